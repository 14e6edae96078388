"""Plain English text for pretraining the tiny Llama that ships with the toolkit.

Everything here is made from fact tables and sentence patterns written for this project, so the
text carries no licence but our own. Two kinds of document come out: short paragraphs of prose, and
question/answer exchanges in the chat-messages form. Both are deliberately plain. The harbour data
set (``data/harbour.jsonl``) asks about the same things in a style of its own, and the base model
must know the things but not the style, so that a fine-tune has something visible to teach.

The module imports the standard library only.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

Message = dict[str, str]
Document = str | list[Message]

CHAT_SHARE = 0.5
"""Share of documents that are question/answer exchanges."""


WRAPPED_SHARE = 0.4
"""Share of answers that carry an opening or closing phrase around the plain answer.

Without them the small model learns to copy from the question at fixed distances, and any fine-tune
that puts words in front of an answer makes it forget the answer itself.
"""

STORY_SHARE = 0.1
"""Share of documents that are everyday stories; what is left is paragraphs of facts."""

TALK = "talk"
"""The topic of greetings and thanks, which make no sense outside an exchange."""


@dataclass(frozen=True)
class Fact:
    """One thing worth knowing, with the ways to ask for it, answer it and state it.

    The first answer is the usual one. ``statements`` are what prose uses; answers are added to them
    because a plain answer is a sentence of its own.
    """

    topic: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    statements: tuple[str, ...] = ()


CAPITALS: dict[str, dict[str, str]] = {
    "Europe": {
        "France": "Paris",
        "Italy": "Rome",
        "Spain": "Madrid",
        "Portugal": "Lisbon",
        "Germany": "Berlin",
        "Austria": "Vienna",
        "Greece": "Athens",
        "Norway": "Oslo",
        "Sweden": "Stockholm",
        "Denmark": "Copenhagen",
        "Finland": "Helsinki",
        "Iceland": "Reykjavik",
        "Ireland": "Dublin",
        "Scotland": "Edinburgh",
        "Wales": "Cardiff",
        "England": "London",
        "Poland": "Warsaw",
        "Hungary": "Budapest",
        "the Czech Republic": "Prague",
        "Belgium": "Brussels",
        "Switzerland": "Bern",
        "Croatia": "Zagreb",
        "Serbia": "Belgrade",
        "Romania": "Bucharest",
        "Bulgaria": "Sofia",
        "the Netherlands": "Amsterdam",
        "Malta": "Valletta",
        "Latvia": "Riga",
        "Estonia": "Tallinn",
        "Lithuania": "Vilnius",
        "Ukraine": "Kyiv",
        "Slovakia": "Bratislava",
        "Slovenia": "Ljubljana",
    },
    "Africa": {
        "Egypt": "Cairo",
        "Kenya": "Nairobi",
        "Morocco": "Rabat",
        "Ghana": "Accra",
        "Ethiopia": "Addis Ababa",
        "Nigeria": "Abuja",
        "Senegal": "Dakar",
        "Tunisia": "Tunis",
        "Uganda": "Kampala",
        "Zambia": "Lusaka",
    },
    "Asia": {
        "Japan": "Tokyo",
        "China": "Beijing",
        "India": "New Delhi",
        "South Korea": "Seoul",
        "Thailand": "Bangkok",
        "Vietnam": "Hanoi",
        "Nepal": "Kathmandu",
        "the Philippines": "Manila",
        "Turkey": "Ankara",
        "Mongolia": "Ulaanbaatar",
        "Jordan": "Amman",
    },
    "North America": {
        "Canada": "Ottawa",
        "Mexico": "Mexico City",
        "Cuba": "Havana",
        "Jamaica": "Kingston",
        "the United States": "Washington",
    },
    "South America": {
        "Brazil": "Brasilia",
        "Argentina": "Buenos Aires",
        "Chile": "Santiago",
        "Peru": "Lima",
        "Colombia": "Bogota",
        "Uruguay": "Montevideo",
        "Ecuador": "Quito",
    },
    "Oceania": {
        "Australia": "Canberra",
        "New Zealand": "Wellington",
        "Fiji": "Suva",
    },
}

SOUNDS = {
    "cow": "moo",
    "sheep": "baa",
    "duck": "quack",
    "dog": "woof",
    "cat": "meow",
    "horse": "neigh",
    "pig": "oink",
    "owl": "hoot",
    "crow": "caw",
    "snake": "hiss",
    "bee": "buzz",
    "lion": "roar",
    "mouse": "squeak",
}

LEGS = {
    "spider": "eight legs",
    "bee": "six legs",
    "ant": "six legs",
    "fly": "six legs",
    "crab": "ten legs",
    "hen": "two legs",
    "duck": "two legs",
    "snake": "no legs",
    "dog": "four legs",
    "cow": "four legs",
    "horse": "four legs",
    "pig": "four legs",
    "cat": "four legs",
    "fox": "four legs",
    "frog": "four legs",
}

DIETS = {
    "rabbit": "grass and leaves",
    "panda": "bamboo",
    "gull": "fish and scraps",
    "koala": "the leaves of gum trees",
    "squirrel": "nuts and seeds",
    "seal": "fish",
    "owl": "mice",
    "cow": "grass",
    "sheep": "grass",
    "horse": "grass and hay",
    "lion": "meat",
    "penguin": "fish",
    "frog": "insects",
    "spider": "insects",
    "giraffe": "leaves",
    "fox": "mice and berries",
    "hen": "seeds and worms",
}

HOMES = {
    "bee": "in a hive",
    "spider": "in a web",
    "rabbit": "in a burrow under the ground",
    "camel": "in the desert",
    "penguin": "in the south, near the ice",
    "owl": "in a hollow tree",
    "fox": "in a den",
    "whale": "in the sea",
    "crab": "on the shore",
    "frog": "near a pond",
    "bird": "in a nest",
    "horse": "in a stable",
    "lion": "on the grassland",
    "ant": "in a nest under the ground",
}

YOUNG = {
    "dog": "puppy",
    "cat": "kitten",
    "sheep": "lamb",
    "horse": "foal",
    "cow": "calf",
    "duck": "duckling",
    "frog": "tadpole",
    "bear": "cub",
    "goat": "kid",
    "swan": "cygnet",
    "pig": "piglet",
    "hen": "chick",
    "fox": "cub",
    "deer": "fawn",
    "lion": "cub",
    "goose": "gosling",
}

KINDS = {
    "whale": "mammal",
    "dolphin": "mammal",
    "bat": "mammal",
    "dog": "mammal",
    "horse": "mammal",
    "frog": "amphibian",
    "toad": "amphibian",
    "snake": "reptile",
    "lizard": "reptile",
    "tortoise": "reptile",
    "eagle": "bird",
    "penguin": "bird",
    "owl": "bird",
    "gull": "bird",
    "ant": "insect",
    "bee": "insect",
    "fly": "insect",
    "cod": "fish",
    "salmon": "fish",
    "shark": "fish",
}

GROUPS = {
    "wolves": "pack",
    "sheep": "flock",
    "fish": "school",
    "birds": "flock",
    "cows": "herd",
    "lions": "pride",
    "bees": "swarm",
}

OPPOSITES = (
    ("hot", "cold"),
    ("big", "small"),
    ("fast", "slow"),
    ("up", "down"),
    ("open", "closed"),
    ("early", "late"),
    ("happy", "sad"),
    ("wet", "dry"),
    ("heavy", "light"),
    ("full", "empty"),
    ("rich", "poor"),
    ("strong", "weak"),
    ("near", "far"),
    ("loud", "quiet"),
    ("young", "old"),
    ("clean", "dirty"),
    ("hard", "soft"),
    ("tall", "short"),
    ("day", "night"),
    ("left", "right"),
    ("before", "after"),
    ("thick", "thin"),
    ("deep", "shallow"),
    ("narrow", "wide"),
    ("rough", "smooth"),
    ("brave", "cowardly"),
    ("begin", "end"),
    ("inside", "outside"),
    ("awake", "asleep"),
    ("first", "last"),
    ("sharp", "blunt"),
    ("true", "false"),
    ("sweet", "sour"),
    ("above", "below"),
    ("push", "pull"),
    ("win", "lose"),
    ("long", "short"),
    ("high", "low"),
    ("good", "bad"),
    ("new", "old"),
    ("summer", "winter"),
    ("north", "south"),
    ("east", "west"),
    ("buy", "sell"),
    ("give", "take"),
    ("easy", "difficult"),
    ("safe", "dangerous"),
    ("warm", "cool"),
    ("same", "different"),
    ("question", "answer"),
)

COLOURS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "a lemon": "yellow",
    "coal": "black",
    "a ripe tomato": "red",
    "a carrot": "orange",
    "an elephant": "grey",
    "chocolate": "brown",
    "a flamingo": "pink",
    "a ripe banana": "yellow",
    "a frog": "green",
    "the sea": "blue",
    "a strawberry": "red",
    "milk": "white",
    "a crow": "black",
    "a plum": "purple",
    "the sun": "yellow",
    "a leaf in summer": "green",
    "a cloud before rain": "grey",
}

MIXES = (
    ("blue", "yellow", "green"),
    ("red", "yellow", "orange"),
    ("red", "blue", "purple"),
    ("black", "white", "grey"),
    ("red", "white", "pink"),
)

NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]

SIDES = {"triangle": "three", "square": "four", "rectangle": "four", "hexagon": "six"}

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]

MONTH_DAYS = {
    "January": "thirty-one",
    "March": "thirty-one",
    "April": "thirty",
    "May": "thirty-one",
    "June": "thirty",
    "July": "thirty-one",
    "August": "thirty-one",
    "September": "thirty",
    "October": "thirty-one",
    "November": "thirty",
    "December": "thirty-one",
}

SEASONS = ("spring", "summer", "autumn", "winter")

TOOLS = {
    "a hammer": "drive nails",
    "a saw": "cut wood",
    "a screwdriver": "turn screws",
    "a spade": "dig a hole",
    "a broom": "sweep the floor",
    "a ladder": "reach high places",
    "a compass": "find north",
    "an anchor": "hold a boat in place",
    "a kettle": "boil water",
    "a tape measure": "measure a plank",
    "a needle": "sew cloth",
    "a brush": "paint a wall",
    "a rake": "gather leaves",
    "a thermometer": "measure heat",
    "a clock": "tell the time",
    "an umbrella": "keep off the rain",
    "a lamp": "light a room",
    "a lighthouse": "guide ships at night",
    "a spanner": "tighten a bolt",
    "an oar": "row a boat",
    "a pump": "move water",
    "a key": "open a lock",
    "a telescope": "see distant things",
    "an axe": "chop wood",
    "a file": "smooth metal",
    "a torch": "see in the dark",
    "a rope": "tie things together",
    "a net": "catch fish",
    "a knife": "slice bread",
    "a pen": "write a letter",
}

INGREDIENTS = {
    "bread": "flour, water, yeast and salt",
    "cheese": "milk",
    "butter": "cream",
    "chocolate": "cocoa beans",
    "wine": "grapes",
    "an omelette": "eggs",
    "jam": "fruit and sugar",
    "porridge": "oats and water or milk",
    "flour": "ground wheat",
    "pasta": "flour and water or eggs",
    "soup": "vegetables and water",
    "toast": "bread",
    "a salad": "raw vegetables",
    "yoghurt": "milk",
    "cider": "apples",
    "paper": "wood",
    "glass": "sand",
}

FOOD_KINDS = {
    "tomato": "fruit",
    "cherry": "fruit",
    "apple": "fruit",
    "pear": "fruit",
    "plum": "fruit",
    "carrot": "vegetable",
    "potato": "vegetable",
    "onion": "vegetable",
    "cabbage": "vegetable",
}

TASTES = {
    "a lemon": "sour",
    "honey": "sweet",
    "sea water": "salty",
    "a strawberry": "sweet",
    "coffee": "bitter",
    "sugar": "sweet",
}

DEFINITIONS = {
    "an island": "land with water all around it",
    "a river": "water that flows across the land to the sea",
    "a harbour": "a safe place for boats near the shore",
    "a mountain": "very high land",
    "a desert": "dry land where little rain falls",
    "a forest": "a large place full of trees",
    "a lake": "a large body of water with land around it",
    "a bridge": "a road built over water or over a valley",
    "a map": "a drawing that shows where places are",
    "a village": "a small group of houses in the country",
    "a dictionary": "a book that tells what words mean",
    "a library": "a place where people borrow books",
    "a museum": "a place where old and rare things are shown",
    "a market": "a place where people buy and sell things",
    "ice": "water that is frozen",
    "a volcano": "a mountain that can throw out hot rock",
    "a valley": "low land between hills",
    "a hill": "high land, but not as high as a mountain",
    "the moon": "a ball of rock that circles the earth",
    "the sun": "a star that gives us light and heat",
    "fog": "a cloud that lies close to the ground",
    "a storm": "bad weather with strong wind and rain",
    "a breeze": "a light wind",
    "a rainbow": "an arc of colours seen when the sun shines on rain",
    "frost": "thin ice that forms on cold surfaces",
    "hail": "ice that falls from storm clouds",
    "dew": "small drops of water found on grass in the morning",
    "the bow": "the front of a boat",
    "the stern": "the back of a boat",
    "port": "the left side of a ship",
    "starboard": "the right side of a ship",
    "a school": "a place where children learn",
}

JOBS = {
    "a baker": "makes bread and cakes",
    "a doctor": "helps people who are ill",
    "a teacher": "helps people to learn",
    "a farmer": "grows food and keeps animals",
    "a pilot": "flies a plane",
    "a sailor": "works on a ship",
    "a carpenter": "makes things from wood",
    "a firefighter": "puts out fires",
    "a plumber": "fixes pipes",
    "a vet": "looks after sick animals",
    "a cook": "makes meals",
    "a tailor": "makes clothes",
    "a fisherman": "catches fish",
    "a painter": "paints walls and pictures",
    "a nurse": "cares for people who are ill",
}

LISTS = {
    "fruits": ("apples", "pears", "plums", "cherries", "lemons"),
    "vegetables": ("carrots", "onions", "peas", "potatoes", "beans"),
    "farm animals": ("cows", "pigs", "hens", "sheep", "goats"),
    "colours": ("red", "blue", "green", "yellow", "orange"),
    "tools": ("a hammer", "a saw", "a spade", "an axe", "a rake"),
    "kinds of fish": ("cod", "herring", "salmon", "trout", "tuna"),
    "trees": ("oak", "ash", "pine", "beech", "birch"),
    "birds": ("the robin", "the crow", "the gull", "the owl", "the swan"),
    "oceans": ("the Atlantic", "the Pacific", "the Indian Ocean", "the Arctic"),
    "drinks": ("water", "milk", "tea", "coffee", "juice"),
    "kinds of weather": ("rain", "snow", "sunshine", "fog", "wind"),
    "flowers": ("the rose", "the tulip", "the daisy", "the lily"),
    "planets": ("Mars", "Venus", "Saturn", "Jupiter", "Mercury"),
    "metals": ("iron", "copper", "gold", "silver", "tin"),
    "instruments": ("the piano", "the violin", "the drum", "the flute"),
    "kinds of boat": ("the ferry", "the canoe", "the tug", "the yacht"),
    "insects": ("ants", "bees", "flies", "beetles"),
    "pets": ("cats", "dogs", "rabbits", "goldfish"),
    "rooms in a house": ("the kitchen", "the bedroom", "the bathroom", "the hall"),
    "things found on a beach": ("sand", "shells", "stones", "seaweed"),
}

SINGLE_FACTS: tuple[tuple[str, str], ...] = (
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many hours are in a day?", "There are twenty-four hours in a day."),
    ("How many minutes are in an hour?", "There are sixty minutes in an hour."),
    ("How many seconds are in a minute?", "There are sixty seconds in a minute."),
    ("Which days make up the weekend?", "The weekend is Saturday and Sunday."),
    ("Name the four seasons.", "The four seasons are spring, summer, autumn and winter."),
    ("Which is the shortest month?", "The shortest month is February."),
    ("Which is the coldest season?", "The coldest season is winter."),
    ("Which is the warmest season?", "The warmest season is summer."),
    ("How many things are in a dozen?", "There are twelve things in a dozen."),
    ("How many things are in a pair?", "There are two things in a pair."),
    ("How many fingers are on one hand?", "There are five fingers on one hand."),
    ("How many planets go round the sun?", "Eight planets go round the sun."),
    ("Which planet do we live on?", "We live on the planet Earth."),
    ("Which planet is nearest to the sun?", "The planet nearest to the sun is Mercury."),
    ("Which is the largest planet?", "The largest planet is Jupiter."),
    ("Which ocean is the largest?", "The largest ocean is the Pacific."),
    ("What is the highest mountain?", "The highest mountain in the world is Mount Everest."),
    ("Which is the largest animal?", "The largest animal is the blue whale."),
    ("Which is the tallest animal?", "The tallest animal is the giraffe."),
    ("What is the fastest animal on land?", "The fastest animal on land is the cheetah."),
    ("Which bird is the largest?", "The largest bird is the ostrich."),
    ("Where does the sun rise?", "The sun rises in the east."),
    ("Where does the sun set?", "The sun sets in the west."),
    ("When does water freeze?", "Water freezes at zero degrees Celsius."),
    ("When does water boil?", "Water boils at one hundred degrees Celsius at sea level."),
    ("What causes the tides?", "The tides are caused by the pull of the moon and the sun."),
    ("What are clouds made of?", "Clouds are made of tiny drops of water or ice."),
    ("What are chips made from?", "Chips are made from potatoes."),
    ("What is snow made of?", "Snow is made of tiny crystals of ice."),
    ("Where does rain come from?", "Rain falls from the clouds."),
    ("Why is the sea salty?", "Rivers carry salt from the rocks into the sea."),
    ("Why do boats float?", "Boats float because they push water away."),
    ("What do plants need to grow?", "Plants need water, light and air to grow."),
    ("What gas do we need to breathe?", "We need oxygen to breathe."),
    ("What part of a plant is under the ground?", "The roots of a plant are under the ground."),
    ("Name the five senses.", "The five senses are sight, hearing, smell, taste and touch."),
    (
        "What are the points of the compass?",
        "The four points of the compass are north, east, south and west.",
    ),
    (
        "Name the primary colours of paint.",
        "The primary colours are red, yellow and blue.",
    ),
    ("What does a red traffic light mean?", "The red light means stop."),
    ("What does a green traffic light mean?", "The green light means go."),
    ("Can penguins fly?", "No, penguins cannot fly, but they swim very well."),
    ("Can a bat fly?", "Yes, a bat can fly very well."),
    ("Is a whale a fish?", "No, a whale is a mammal."),
    ("Is a potato a fruit?", "No, a potato is a vegetable."),
    ("Which animal gives us wool?", "Sheep give us wool."),
    ("Which animal makes honey?", "Bees make honey."),
    ("Which animal gives us eggs?", "Hens give us eggs."),
    ("Which animal gives us milk?", "Cows give us milk."),
)

SMALL_TALK: tuple[tuple[str, str], ...] = (
    ("Hello!", "Hello. What would you like to know?"),
    ("Good morning!", "Good morning. How can I help you?"),
    ("Good evening!", "Good evening. How can I help you?"),
    ("Who are you?", "I am a small helper, and I answer short questions."),
    ("How are you?", "I am very well, thank you."),
    ("Thank you!", "You are welcome."),
    ("Can I ask you something?", "Of course. Ask me anything you like."),
    ("Goodbye!", "Goodbye, and take care."),
)

ADVICE: tuple[tuple[str, str, str], ...] = (
    ("I cannot sleep.", "sleep well", "Keep the room dark and read something quiet."),
    ("I am tired.", "feel less tired", "Rest a little and drink some water."),
    ("I am bored.", "fill a dull day", "Take a walk, read a book or call a friend."),
    ("I am lost.", "find the way", "Stay calm, stop walking and ask someone for help."),
    ("I am cold.", "keep warm", "Wear a warm coat, a hat and gloves."),
    ("I am hungry.", "make a simple supper", "Make some hot soup and eat it with bread."),
    ("I feel sad.", "feel better", "Take a walk in fresh air and talk to a friend."),
    ("I feel nervous.", "feel calm", "Breathe slowly and think of one thing at a time."),
    ("I have a headache.", "ease a headache", "Drink some water and rest in a quiet room."),
    ("My plant looks dry.", "look after a plant", "Give it some water and move it out of the sun."),
    ("My shoes are wet.", "dry wet shoes", "Fill them with paper and leave them in a warm place."),
    ("My desk is a mess.", "keep a desk tidy", "Put each thing back in its place after work."),
    ("It is raining.", "stay dry in the rain", "Wear a coat and boots in the rain."),
    ("It is sunny.", "stay cool in the sun", "Take a hat and some water with you."),
    ("I am always late.", "be on time", "Get ready ten minutes early and leave at once."),
    ("I need to save money.", "save money", "Write down what you spend and put a little away."),
    ("I want to learn a word.", "learn a new word", "Write it down and use it three times."),
    ("I want to be healthy.", "stay healthy", "Eat well, sleep well and walk every day."),
    ("I want a cup of tea.", "make tea", "Boil some water, pour it over the tea and wait."),
    ("I want an egg.", "boil an egg", "Put the egg in boiling water for eight minutes."),
    ("I want a friend.", "make a friend", "Smile, say hello and ask a kind question."),
    ("I want to draw.", "get better at drawing", "Draw a little every day and look closely."),
    ("I have a long job.", "start a long job", "Break it into small parts and begin with one."),
    ("I am going on a trip.", "pack for a trip", "Pack water, some food, a map and a coat."),
    ("I am going on a boat.", "dress for a boat", "Wear a life jacket and soft shoes."),
    ("I must cross the road.", "cross the road", "Stop, look both ways and listen for cars."),
    ("My bread is dry.", "keep bread fresh", "Keep it in a closed box in a cool, dry place."),
)

NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Ella",
    "Frank",
    "Grace",
    "Henry",
    "Ida",
    "Jack",
    "Kate",
    "Leo",
    "Mary",
    "Noah",
    "Olive",
    "Peter",
    "Rosa",
    "Sam",
    "Tom",
    "Vera",
    "Will",
]

SHE = frozenset(["Anna", "Clara", "Ella", "Grace", "Ida", "Kate", "Mary", "Olive", "Rosa", "Vera"])

ERRANDS = (
    ("went to the market", "bought apples and fresh bread", "It was busy, and the bread was warm."),
    ("walked to the library", "borrowed a book about the sea", "The room was quiet and bright."),
    ("worked in the garden", "planted beans along the wall", "The ground was soft after the rain."),
    ("sat by the window", "wrote a long letter", "The street outside was still."),
    ("walked along the shore", "found a smooth grey stone", "The tide was low."),
    ("went to the kitchen", "made soup with carrots and onions", "Soon the house smelled good."),
    ("opened the shed", "took out a hammer and a saw", "There was a fence to mend."),
    ("took the train to the city", "met an old friend", "They talked for hours."),
    ("climbed the hill", "looked down at the village", "The houses seemed very small."),
    ("cleaned the house", "washed the windows", "The light came in again."),
    ("rowed across the lake", "caught two small fish", "The water was like glass."),
    ("went to school", "learned about the planets", "The lesson ended too soon."),
    ("visited the farm", "fed the hens and the goats", "One goat ate a glove."),
    ("stayed at home", "read by the fire", "The wind was loud in the trees."),
    ("walked in the forest", "saw a fox near the path", "It looked up and was gone."),
    ("mended the old boat", "painted it blue", "It was ready for the summer."),
)

TIMES = (
    "In the morning",
    "After lunch",
    "Before supper",
    "Late in the day",
    "One day in spring",
    "On a cold day",
    "On Saturday",
    "On Monday",
    "Last summer",
    "In the evening",
)

ENDINGS = (
    "{they} came home happy.",
    "{they} went to bed early.",
    "{they} thought about it all evening.",
    "{they} told the story at supper.",
    "{they} was tired but glad.",
    "{they} will do it again next week.",
    "Then the rain began.",
    "It was a good day.",
    "Nobody was in a hurry.",
)

OPENERS = (
    "Yes.",
    "Sure.",
    "Sure!",
    "Of course.",
    "Of course!",
    "Certainly.",
    "Gladly.",
    "Well now.",
    "Right!",
    "Good question!",
    "Good question.",
    "Let me see.",
    "Let me think.",
    "That is easy.",
    "That is easy!",
    "Here you are.",
    "I know this one!",
    "I do know that.",
    "With pleasure.",
    "Hello!",
    "Hello there!",
    "Greetings!",
    "Good day!",
    "Bonjour!",
    "Hallo!",
    "Hola!",
    "Ciao!",
    "Aha!",
    "Oh!",
    "My friend!",
    "Listen!",
    "Thank you for asking.",
)

CLOSERS = (
    "I hope that helps.",
    "I hope this helps you.",
    "Ask me again any time.",
    "Is there more?",
    "That is all.",
    "That is the answer.",
    "Good luck.",
    "Good luck!",
    "Take care.",
    "Have a good day.",
    "Best wishes.",
    "Kind regards.",
    "See you soon.",
    "Until next time.",
    "Goodbye.",
    "Adieu.",
    "Good night.",
    "Be well.",
    "Cheers.",
    "Warm greetings.",
    "Happy days.",
    "Easy.",
    "Now you know.",
    "Remember it well.",
)

PLURALS = {"sheep": "sheep", "fox": "foxes", "fly": "flies", "mouse": "mice"}
"""The plurals that are not made by adding an s."""


def plural(noun: str) -> str:
    """Return the plural of an animal's name."""
    return PLURALS.get(noun, f"{noun}s")


def article(noun: str) -> str:
    """Return the noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def sentence(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[0].upper() + text[1:]


def clause(complaint: str) -> str:
    """Return a sentence of ``ADVICE`` as it stands after "if": no stop, no capital but for "I"."""
    text = complaint.removesuffix(".")
    return text if text.startswith("I ") else text[0].lower() + text[1:]


def _capital_facts() -> Iterator[Fact]:
    for continent, countries in CAPITALS.items():
        for country, city in countries.items():
            yield Fact(
                "capitals",
                (
                    f"What is the capital of {country}?",
                    f"What's the capital of {country}?",
                    f"Which city is the capital of {country}?",
                    f"Name the capital of {country}.",
                    f"Tell me the capital of {country}, please.",
                    f"Do you know the capital of {country}?",
                    f"What is the capital city of {country}?",
                ),
                (f"The capital of {country} is {city}.",),
                (f"{city} is the capital of {country}.",),
            )
            yield Fact(
                "continents",
                (
                    f"On which continent is {country}?",
                    f"Which continent is {country} part of?",
                    f"Where in the world is {country}?",
                ),
                (f"{sentence(country)} is a country in {continent}.",),
                (f"{city} is a city in {continent}.",),
            )


def _animal_facts() -> Iterator[Fact]:
    for animal, sound in SOUNDS.items():
        yield Fact(
            "sounds",
            (
                f"What sound does {article(animal)} make?",
                f"What does {article(animal)} say?",
                f"What noise does {article(animal)} make?",
            ),
            (f"{sentence(article(animal))} says {sound}.",),
        )
    for animal, legs in LEGS.items():
        yield Fact(
            "legs",
            (
                f"How many legs does {article(animal)} have?",
                f"Tell me how many legs {article(animal)} has.",
            ),
            (f"{sentence(article(animal))} has {legs}.",),
        )
    for animal, food in DIETS.items():
        yield Fact(
            "diets",
            (f"What does {article(animal)} eat?", f"What does {article(animal)} like to eat?"),
            (f"{sentence(article(animal))} eats {food}.",),
        )
        yield Fact(
            "diets",
            (f"What do {plural(animal)} eat?", f"What do {plural(animal)} like to eat?"),
            (f"{sentence(plural(animal))} eat {food}.",),
        )
    for animal, home in HOMES.items():
        yield Fact(
            "homes",
            (f"Where does {article(animal)} live?", f"Where can I find {article(animal)}?"),
            (f"{sentence(article(animal))} lives {home}.",),
        )
        yield Fact(
            "homes",
            (f"Where do {plural(animal)} live?",),
            (f"{sentence(plural(animal))} live {home}.",),
        )
    for animal, young in YOUNG.items():
        yield Fact(
            "young",
            (
                f"What is a baby {animal} called?",
                f"What do you call a baby {animal}?",
                f"What is the name for a baby {animal}?",
            ),
            (f"A baby {animal} is called a {young}.",),
        )
    for animal, kind in KINDS.items():
        yield Fact(
            "kinds",
            (
                f"What kind of animal is {article(animal)}?",
                f"Which kind of animal is {article(animal)}?",
            ),
            (f"{sentence(article(animal))} is {article(kind)}.",),
        )
    for animals, group in GROUPS.items():
        yield Fact(
            "groups",
            (f"What is a group of {animals} called?", f"What do you call a group of {animals}?"),
            (f"A group of {animals} is called a {group}.",),
        )


def _opposite_facts() -> Iterator[Fact]:
    for pair in OPPOSITES:
        for word, other in (pair, pair[::-1]):
            # "short" and "old" close two pairs each, so only the forward direction is unambiguous.
            if pair[1] == word and word in {"short", "old"}:
                continue
            yield Fact(
                "opposites",
                (
                    f"What is the opposite of {word}?",
                    f"What's the opposite of {word}?",
                    f"Which word is the opposite of {word}?",
                    f"Give me the opposite of {word}.",
                    f"Tell me the opposite of {word}.",
                    f"Do you know the opposite of {word}?",
                ),
                (f"The opposite of {word} is {other}.",),
            )


def _colour_facts() -> Iterator[Fact]:
    for thing, colour in COLOURS.items():
        yield Fact(
            "colours",
            (
                f"What colour is {thing}?",
                f"Tell me the colour of {thing}.",
                f"Which colour is {thing}?",
            ),
            (f"{sentence(thing)} is {colour}.",),
            (f"The colour of {thing} is {colour}.",),
        )
    for first, second, mixed in MIXES:
        yield Fact(
            "mixes",
            (
                f"What do {first} and {second} make?",
                f"Which colour do {first} and {second} make together?",
                f"What do you get when you mix {first} and {second}?",
            ),
            (f"{sentence(first)} and {second} make {mixed}.",),
        )


def _number_facts() -> Iterator[Fact]:
    for a in range(11):
        for b in range(11):
            first, second = NUMBERS[a], NUMBERS[b]
            total = NUMBERS[a + b]
            yield Fact(
                "sums",
                (
                    f"What is {first} plus {second}?",
                    f"How much is {first} plus {second}?",
                    f"What is {a} plus {b}?",
                    f"Add {first} and {second}.",
                ),
                (f"{sentence(first)} plus {second} is {total}.",),
            )
            if a >= b:
                yield Fact(
                    "differences",
                    (
                        f"What is {first} minus {second}?",
                        f"How much is {first} minus {second}?",
                        f"Take {second} from {first}.",
                    ),
                    (f"{sentence(first)} minus {second} is {NUMBERS[a - b]}.",),
                )
            if a >= 2 and b >= 2 and a * b <= 20:
                yield Fact(
                    "products",
                    (f"What is {first} times {second}?", f"How much is {first} times {second}?"),
                    (f"{sentence(first)} times {second} is {NUMBERS[a * b]}.",),
                )
    for half in range(1, 11):
        number, whole = NUMBERS[half], NUMBERS[2 * half]
        yield Fact("halves", (f"What is half of {whole}?",), (f"Half of {whole} is {number}.",))
        yield Fact("doubles", (f"What is double {number}?",), (f"Double {number} is {whole}.",))
    for number, after in pairwise(NUMBERS):
        yield Fact(
            "counting",
            (f"Which number comes after {number}?", f"What number follows {number}?"),
            (f"The number after {number} is {after}.",),
        )
        yield Fact(
            "counting",
            (f"Which number comes before {after}?",),
            (f"The number before {after} is {number}.",),
        )
    for shape, sides in SIDES.items():
        yield Fact(
            "shapes",
            (
                f"How many sides does {article(shape)} have?",
                f"How many sides has {article(shape)}?",
            ),
            (f"{sentence(article(shape))} has {sides} sides.",),
        )


def _calendar_facts() -> Iterator[Fact]:
    cycles = (("day", DAYS), ("month", MONTHS), ("season", SEASONS))
    for unit, names in cycles:
        for position, name in enumerate(names):
            following = names[(position + 1) % len(names)]
            yield Fact(
                "calendar",
                (
                    f"What {unit} comes after {name}?",
                    f"Which {unit} comes after {name}?",
                    f"Which {unit} follows {name}?",
                ),
                (f"The {unit} after {name} is {following}.",),
                (f"After {name} comes {following}.",),
            )
            yield Fact(
                "calendar",
                (f"What {unit} comes before {following}?", f"Which {unit} is before {following}?"),
                (f"The {unit} before {following} is {name}.",),
            )
    for today, tomorrow in zip(DAYS, DAYS[1:] + DAYS[:1], strict=True):
        yield Fact(
            "calendar",
            (f"If today is {today}, what is tomorrow?",),
            (f"If today is {today}, tomorrow is {tomorrow}.",),
        )
        yield Fact(
            "calendar",
            (f"If today is {tomorrow}, what was yesterday?",),
            (f"If today is {tomorrow}, yesterday was {today}.",),
        )
    for month, days in MONTH_DAYS.items():
        yield Fact(
            "calendar",
            (f"How many days are in {month}?", f"How many days does {month} have?"),
            (f"There are {days} days in {month}.",),
        )


def _thing_facts() -> Iterator[Fact]:
    for tool, use in TOOLS.items():
        yield Fact(
            "tools",
            (
                f"What is {tool} for?",
                f"What is {tool} used for?",
                f"What do you do with {tool}?",
            ),
            (f"{sentence(tool)} is used to {use}.",),
        )
        yield Fact(
            "tools",
            (f"Which tool do I need to {use}?", f"What do I need to {use}?"),
            (f"You need {tool} to {use}.",),
        )
    for food, parts in INGREDIENTS.items():
        yield Fact(
            "ingredients",
            (f"What is {food} made from?", f"What is {food} made of?"),
            (f"{sentence(food)} is made from {parts}.",),
        )
    for food, kind in FOOD_KINDS.items():
        yield Fact(
            "food",
            (f"What kind of food is {article(food)}?",),
            (f"{sentence(article(food))} is a {kind}.",),
        )
    for food, taste in TASTES.items():
        yield Fact(
            "food",
            (f"How does {food} taste?", f"What does {food} taste like?"),
            (f"{sentence(food)} tastes {taste}.",),
        )
    for word, meaning in DEFINITIONS.items():
        yield Fact(
            "definitions",
            (f"What is {word}?", f"Tell me what {word} is."),
            (f"{sentence(word)} is {meaning}.",),
        )
    for worker, work in JOBS.items():
        yield Fact(
            "jobs",
            (f"What does {worker} do?", f"What is the work of {worker}?"),
            (f"{sentence(worker)} {work}.",),
        )
        yield Fact("jobs", (f"Who {work}?",), (f"{sentence(worker)} {work}.",))


def _list_facts() -> Iterator[Fact]:
    for heading, members in LISTS.items():
        # Two rotations, so that the pattern of a list is learned and not one fixed answer alone.
        answers = tuple(
            f"Three {heading} are {trio[0]}, {trio[1]} and {trio[2]}."
            for trio in (members[:3], members[1:4])
        )
        yield Fact(
            "lists",
            (
                f"Name three {heading}.",
                f"List three {heading}.",
                f"Can you name three {heading}?",
                f"Give me three {heading}.",
            ),
            answers,
        )


def _free_facts() -> Iterator[Fact]:
    for question, answer in SINGLE_FACTS:
        yield Fact("general", (question,), (answer,))
    for question, answer in SMALL_TALK:
        yield Fact(TALK, (question,), (answer,))
    for complaint, goal, advice in ADVICE:
        yield Fact(
            "advice",
            (
                f"{complaint} What should I do?",
                f"How do I {goal}?",
                f"How can I {goal}?",
                f"{complaint} Any advice?",
                f"What should I do if {clause(complaint)}?",
            ),
            (advice,),
            (f"To {goal}, people often do this. {advice}",),
        )


def all_facts() -> list[Fact]:
    """Return every fact of the tables above, in a fixed order."""
    makers = (
        _capital_facts,
        _animal_facts,
        _opposite_facts,
        _colour_facts,
        _number_facts,
        _calendar_facts,
        _thing_facts,
        _list_facts,
        _free_facts,
    )
    return [fact for maker in makers for fact in maker()]


def _story(rng: random.Random) -> str:
    """Return a small everyday story of three or four sentences."""
    name = rng.choice(NAMES)
    they = "She" if name in SHE else "He"
    went, did, remark = rng.choice(ERRANDS)
    parts = [f"{rng.choice(TIMES)} {name} {went} and {did}.", remark]
    if rng.random() < 0.5:
        friend = rng.choice([other for other in NAMES if other != name])
        parts.append(f"{friend} came along to help.")
    parts.append(rng.choice(ENDINGS).format(they=they))
    return " ".join(parts)


class _Shelf:
    """The facts by topic, with a way to draw a topic.

    A topic's weight is its size to the power 3/4: large topics need more draws to be learned, but
    the many sums should not crowd out the few shapes.
    """

    def __init__(self, facts: list[Fact]) -> None:
        self.topics: dict[str, list[Fact]] = {}
        for fact in facts:
            self.topics.setdefault(fact.topic, []).append(fact)
        self._names = list(self.topics)
        self._weights = [len(self.topics[name]) ** 0.75 for name in self._names]

    def draw(self, rng: random.Random) -> list[Fact]:
        """Return the facts of one topic, drawn by weight."""
        return self.topics[rng.choices(self._names, weights=self._weights)[0]]


def _paragraph(rng: random.Random, shelf: _Shelf) -> str:
    """Return a few statements on one topic, now and then with a story in front."""
    facts = shelf.draw(rng)
    chosen = rng.sample(facts, min(len(facts), rng.randint(3, 6)))
    lines = [rng.choice(fact.statements + fact.answers) for fact in chosen]
    if rng.random() < 0.25:
        lines.insert(0, _story(rng))
    return " ".join(lines)


def _wrapped(rng: random.Random, answer: str) -> str:
    """Return the answer, now and then with an opening phrase, a closing phrase or both."""
    if rng.random() >= WRAPPED_SHARE:
        return answer
    which = rng.randrange(4)
    parts = [answer]
    # Both is the commonest wrapping: it moves the answer and keeps it from being the end.
    if which != 0:
        parts.insert(0, rng.choice(OPENERS))
    if which != 1:
        parts.append(rng.choice(CLOSERS))
    return " ".join(parts)


def _exchange(rng: random.Random, shelf: _Shelf) -> list[Message]:
    """Return a conversation of one to three plain question/answer turns."""
    turns = rng.choices((1, 2, 3), weights=(6, 3, 1))[0]
    messages: list[Message] = []
    for _ in range(turns):
        fact = rng.choice(shelf.draw(rng))
        messages.append({"role": "user", "content": rng.choice(fact.questions)})
        answer = rng.choice(fact.answers)
        if fact.topic != TALK:
            answer = _wrapped(rng, answer)
        messages.append({"role": "assistant", "content": answer})
    return messages


def documents(seed: int, count: int) -> Iterator[Document]:
    """Yield ``count`` documents, the same ones for the same seed.

    A string is prose; a list of messages is an exchange to be rendered with the chat template.
    """
    rng = random.Random(seed)
    facts = all_facts()
    everything = _Shelf(facts)
    for_prose = _Shelf([fact for fact in facts if fact.topic != TALK])
    for _ in range(count):
        draw = rng.random()
        if draw < CHAT_SHARE:
            yield _exchange(rng, everything)
        elif draw < CHAT_SHARE + STORY_SHARE:
            yield _story(rng)
        else:
            yield _paragraph(rng, for_prose)
