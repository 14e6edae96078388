"""Draw the packaged pictures: ships, flags, lights, buoys and harbours, and questions on them.

Run as ``python -m tests.asset_makers.make_pictures``. Each picture is 64 x 64 pixels of a palette,
drawn without smoothing, and no two are alike: time of day, horizon, clouds, waves, place and size
are drawn by chance, from one seed. What is asked cannot be guessed from the question: its answers
are dealt evenly, 30 for "What ship is this?".

Held out are pictures of their own. The ships of `UNSEEN`, such as a red tug, are in no training
picture, although red ships and tugs are: who reads a picture answers them, who remembers does not.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from finetune.config.paths import ASSETS

FOLDER = ASSETS / "data"
SIZE = 64
PALETTE = {
    "day": (158, 206, 236), "dusk": (238, 178, 132), "night": (20, 24, 54),
    "sea": (46, 108, 158), "dark sea": (26, 62, 98), "night sea": (10, 34, 62),
    "red": (206, 36, 40), "green": (24, 140, 62), "yellow": (250, 208, 30), "blue": (30, 60, 200),
    "white": (250, 250, 250), "black": (14, 14, 14), "grey": (138, 142, 148),
    "brown": (118, 76, 42), "cloud": (214, 226, 236), "shade": (64, 68, 78),
}  # fmt: skip
INDEX = {name: index for index, name in enumerate(PALETTE)}
COLOURS = ("red", "green", "blue", "yellow", "black")
KINDS = ("trawler", "ferry", "yacht", "tug", "tanker", "freighter")
LIGHTS, PLACES = ("red", "green", "white", "yellow"), ("to port", "to starboard", "at the masthead")
BUOYS, MARKS = ("can", "cone", "ball", "pillar"), ("red", "green", "yellow")
FLAGS = (
    *("Bravo", "Charlie", "Delta", "Hotel", "Juliett"),
    *("Kilo", "Lima", "Oscar", "Quebec", "Uniform"),
)
NUMBERS = ("One boat", "Two boats", "Three boats", "Four boats")
UNSEEN = {("red", "tug"), ("green", "ferry"), ("blue", "trawler"), ("black", "yacht")}
"""Ships of which only held-out pictures show any."""
COUNTS = {
    "ship": (192, 36),
    "flag": (120, 20),
    "light": (144, 24),
    "buoy": (144, 24),
    "harbour": (100, 20),
}
"""Pictures to train on and held out, of each subject."""


class Scene:
    """A picture being drawn: names of the palette for colours, (0, 0) at the upper left."""

    def __init__(self, chance: random.Random, time: str | None = None) -> None:
        self.chance = chance
        self.time = time or chance.choice(("day", "day", "dusk", "night"))
        self.horizon = chance.randint(33, 37)
        self.image = Image.new("P", (SIZE, SIZE), INDEX[self.time])
        self.image.putpalette([value for colour in PALETTE.values() for value in colour])
        self._draw = ImageDraw.Draw(self.image)
        sea = {"day": "sea", "dusk": "dark sea", "night": "night sea"}[self.time]
        self.box((0, self.horizon, SIZE, SIZE), sea)
        self._sky()
        self._waves()

    def _sky(self) -> None:
        for _ in range(self.chance.randint(0, 4)):
            x, y = self.chance.randint(0, SIZE), self.chance.randint(2, self.horizon - 8)
            if self.time == "night":
                self.box((x, y, x + 1, y + 1), "grey")
            else:
                width = self.chance.randint(5, 14)
                self.box((x, y, x + width, y + 2), "cloud")
                self.box((x + 2, y - 1, x + width - 2, y), "cloud")

    def _waves(self) -> None:
        for _ in range(self.chance.randint(3, 9)):
            x, y = self.chance.randint(0, SIZE), self.chance.randint(self.horizon + 3, SIZE - 2)
            tint = "grey" if self.time == "night" else "cloud"
            self.box((x, y, x + self.chance.randint(2, 6), y + 1), tint)

    def box(self, corners: tuple[int, int, int, int], colour: str) -> None:
        """A rectangle (left, top, right, bottom); right and bottom lie outside of it."""
        left, top, right, bottom = corners
        if right > left and bottom > top:
            self._draw.rectangle((left, top, right - 1, bottom - 1), fill=INDEX[colour])

    def shape(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """A filled polygon."""
        self._draw.polygon([(round(x), round(y)) for x, y in points], fill=INDEX[colour])

    def disc(self, x: int, y: int, radius: int, colour: str) -> None:
        """A filled circle."""
        self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=INDEX[colour])


# ---------------------------------------------------------------------------------------- subjects


Pen = Callable[[Sequence[tuple[float, float]], str], None]
"""Draws a polygon in a ship's own measure: x from 0 (stern) to 40 (bow), y up from the water."""


def _rectangle(pen: Pen, left: float, bottom: float, right: float, top: float, colour: str) -> None:
    pen([(left, bottom), (right, bottom), (right, top), (left, top)], colour)


def _trawler(pen: Pen, colour: str) -> None:
    pen([(3, -3), (32, -3), (38, 8), (30, 5), (3, 5)], colour)
    _rectangle(pen, 18, 5, 27, 13, "white")
    _rectangle(pen, 20, 9, 25, 11, "shade")
    _rectangle(pen, 5, 5, 6, 19, "brown")  # the gallows that its nets hang from
    _rectangle(pen, 13, 5, 14, 19, "brown")
    _rectangle(pen, 5, 18, 14, 19, "brown")


def _ferry(pen: Pen, colour: str) -> None:
    pen([(0, -3), (37, -3), (41, 6), (0, 6)], colour)
    _rectangle(pen, 1, 6, 37, 11, "white")
    _rectangle(pen, 4, 11, 33, 16, "white")
    for x in range(4, 34, 4):
        _rectangle(pen, x, 8, x + 2, 9, "shade")
    _rectangle(pen, 9, 16, 14, 20, colour)


def _yacht(pen: Pen, colour: str) -> None:
    pen([(8, -2), (29, -2), (34, 3), (6, 3)], colour)
    pen([(19, 5), (19, 28), (7, 5)], "white")
    pen([(21, 5), (21, 25), (32, 5)], "cloud")
    _rectangle(pen, 19.5, 3, 20.5, 29, "brown")


def _tug(pen: Pen, colour: str) -> None:
    pen([(8, -3), (30, -3), (34, 9), (26, 6), (8, 4)], colour)
    _rectangle(pen, 17, 5, 27, 17, "white")
    _rectangle(pen, 19, 12, 25, 15, "shade")
    _rectangle(pen, 10, 5, 16, 15, "grey")
    _rectangle(pen, 10, 12, 16, 15, "black")


def _tanker(pen: Pen, colour: str) -> None:
    pen([(-3, -4), (40, -4), (44, 4), (-3, 4)], colour)
    _rectangle(pen, -1, 4, 6, 16, "white")
    _rectangle(pen, 0, 12, 5, 14, "shade")
    _rectangle(pen, 8, 6, 38, 7, "grey")
    _rectangle(pen, 21, 4, 23, 10, "grey")


def _freighter(pen: Pen, colour: str) -> None:
    pen([(-3, -4), (39, -4), (44, 6), (-3, 6)], colour)
    _rectangle(pen, -2, 6, 5, 19, "white")
    _rectangle(pen, 8, 6, 37, 13, "grey")
    for x in range(8, 38, 6):
        _rectangle(pen, x, 6, x + 1, 13, "shade")
    _rectangle(pen, 14, 13, 26, 18, "brown")


SHIPS = dict(zip(KINDS, (_trawler, _ferry, _yacht, _tug, _tanker, _freighter), strict=True))


def ship(scene: Scene, colour: str, kind: str, heading: str) -> None:
    """A ship from its side."""
    chance = scene.chance
    scale, forward = chance.uniform(1.0, 1.15), 1 if heading == "right" else -1
    x = chance.randint(30, 34) - 20 * scale * forward
    water = 43 + chance.randint(-2, 2)

    def pen(points: Sequence[tuple[float, float]], colour: str) -> None:
        scene.shape([(x + forward * scale * px, water - scale * py) for px, py in points], colour)

    for stern in (-4, -9, -14):  # her wake
        _rectangle(pen, stern - 3, -4, stern, -2, "white")
    SHIPS[kind](pen, colour)


def flag(scene: Scene, name: str) -> None:
    """A flag of the international code on a mast."""
    chance = scene.chance
    width, height = 2 * chance.randint(13, 15), 2 * chance.randint(10, 12)
    x, y = chance.randint(14, 18), chance.randint(8, 11)
    scene.box((x - 2, y - 2, x, SIZE - chance.randint(2, 12)), "brown")
    right, bottom, middle, half = x + width, y + height, x + width // 2, y + height // 2
    whole = (x, y, right, bottom)
    tail = [(x, y), (right, y), (right - height / 3, half), (right, bottom - 1), (x, bottom - 1)]

    def rows(*colours: str) -> None:
        for n, colour in enumerate(colours):
            part = height / len(colours)
            scene.box((x, y + round(n * part), right, y + round((n + 1) * part)), colour)

    def quarters(first: str, second: str) -> None:
        scene.box(whole, first)
        scene.box((middle, y, right, half), second)
        scene.box((x, half, middle, bottom), second)

    def halves(first: str, second: str) -> None:
        scene.box((x, y, middle, bottom), first)
        scene.box((middle, y, right, bottom), second)

    drawn: dict[str, Callable[[], None]] = {
        "Bravo": lambda: scene.shape(tail, "red"),
        "Charlie": lambda: rows("blue", "white", "red", "white", "blue"),
        "Delta": lambda: rows("yellow", "blue", "yellow"),
        "Hotel": lambda: halves("white", "red"),
        "Juliett": lambda: rows("blue", "white", "blue"),
        "Kilo": lambda: halves("yellow", "blue"),
        "Lima": lambda: quarters("yellow", "black"),
        "Oscar": lambda: scene.box(whole, "yellow"),
        "Quebec": lambda: scene.box(whole, "yellow"),
        "Uniform": lambda: quarters("red", "white"),
    }
    drawn[name]()
    if name == "Oscar":
        scene.shape([(x, y), (right - 1, y), (right - 1, bottom - 1)], "red")


def hull(
    scene: Scene, x: int, bottom: int, halves: tuple[int, int], height: int, colour: str
) -> None:
    """A trapezium over `bottom`, half as wide as `halves` say: above and below."""
    (above, below), top = halves, bottom - height
    corners = [(x - above, top), (x + above, top), (x + below, bottom), (x - below, bottom)]
    scene.shape(corners, colour)


def light(scene: Scene, colour: str, place: str) -> None:
    """A ship at night from ahead: its port side is on the right, where the viewer looks at it."""
    chance = scene.chance
    x, water = chance.randint(30, 34), 46 + chance.randint(-2, 2)
    half = chance.randint(12, 14)
    top = water - chance.randint(12, 14)
    hull(scene, x, water, (half, half - 5), water - top, "shade")
    scene.box((x - 5, top - 8, x + 6, top), "shade")
    mast = top - chance.randint(19, 22)
    scene.box((x, mast, x + 1, top), "shade")
    at = {
        "to port": (x + half, top - 4),
        "to starboard": (x - half, top - 4),
        "at the masthead": (x, mast),
    }
    scene.disc(*at[place], chance.choice((3, 4)), colour)


def buoy(scene: Scene, colour: str, form: str) -> None:
    """A buoy; forms as in the international system: can, cone, ball and pillar."""
    chance = scene.chance
    x, half = chance.randint(30, 34), chance.randint(9, 11)
    water = 48 + chance.randint(-2, 2)
    if form == "can":
        scene.box((x - half, water - 2 * half, x + half, water), colour)
    elif form == "cone":
        scene.shape([(x - half, water), (x + half, water), (x, water - 2 * half - 4)], colour)
    elif form == "ball":
        scene.disc(x, water - half, half, colour)
    else:
        scene.box((x - half, water - 4, x + half, water), colour)
        scene.box((x - 3, water - 3 * half, x + 3, water), colour)
    scene.box((x - half, water, x + half, water + 1), "black")


def harbour(scene: Scene, boats: int, side: str) -> None:
    """Boats on the water, and a lighthouse on one side."""
    chance = scene.chance
    x = chance.randint(4, 9) if side == "left" else chance.randint(54, 59)
    hull(scene, x, scene.horizon + 1, (0, 12), 5, "brown")
    top = scene.horizon - chance.randint(20, 25)
    scene.box((x - 3, top, x + 3, scene.horizon - 2), "white")
    scene.box((x - 3, top + 6, x + 3, top + 11), "red")
    scene.box((x - 2, top - 3, x + 2, top), "yellow")
    places = [(column, row) for column in (12, 32, 52) for row in (0, 1)]
    for column, row in chance.sample(places, boats):
        left = column + chance.randint(-2, 2)
        water = 46 + 13 * row + chance.randint(-1, 1)
        hull(scene, left, water, (6, 4), 3, chance.choice(COLOURS))
        scene.shape([(left, water - 4), (left, water - 10), (left + 5, water - 4)], "white")


# -------------------------------------------------------------------------------------------- rows


def _turns(*asked: tuple[str, str]) -> list[dict[str, Any]]:
    """Turns of a row with one picture in its first question."""
    turns = []
    for index, (question, answer) in enumerate(asked):
        picture = [] if index else [{"type": "image"}]
        turns.append({"role": "user", "content": [*picture, {"type": "text", "text": question}]})
        turns.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return turns


def _ship(scene: Scene, pair: tuple[str, str]) -> list[dict[str, Any]]:
    heading = scene.chance.choice(("left", "right"))
    ship(scene, *pair, heading)
    asked = ("What ship is this?", f"A {pair[0]} {pair[1]}.")
    return _turns(asked, ("Which way is she heading?", f"To the {heading}."))


def _flag(scene: Scene, name: str) -> list[dict[str, Any]]:
    flag(scene, name)
    return _turns(("Which flag is flying?", f"Flag {name}."))


def _light(scene: Scene, pair: tuple[str, str]) -> list[dict[str, Any]]:
    light(scene, *pair)
    return _turns(("What does the signal show?", f"A {pair[0]} light {pair[1]}."))


def _buoy(scene: Scene, pair: tuple[str, str]) -> list[dict[str, Any]]:
    buoy(scene, *pair)
    return _turns(("What buoy is this?", f"A {pair[0]} {pair[1]}."))


def _harbour(scene: Scene, pair: tuple[int, str]) -> list[dict[str, Any]]:
    harbour(scene, *pair)
    asked = ("How many boats are in the harbour?", f"{NUMBERS[pair[0] - 1]}.")
    return _turns(asked, ("Where is the lighthouse?", f"On the {pair[1]}."))


SUBJECTS: dict[str, tuple[Callable[[Scene, Any], list[dict[str, Any]]], list[Any]]] = {
    "ship": (_ship, list(itertools.product(COLOURS, KINDS))),
    "flag": (_flag, list(FLAGS)),
    "light": (_light, list(itertools.product(LIGHTS, PLACES))),
    "buoy": (_buoy, list(itertools.product(MARKS, BUOYS))),
    "harbour": (_harbour, list(itertools.product(range(1, 5), ("left", "right")))),
}
"""Subject -> what draws a picture of it and asks, and what there is to draw."""


def pictures(subject: str, held_out: bool) -> list[tuple[Image.Image, list[dict[str, Any]]]]:
    """Pictures of a subject with their turns; what they show is dealt evenly.

    A third of the ships that are held out are ones that training does not show.
    """
    draw, shown = SUBJECTS[subject]
    seen = [one for one in shown if one not in UNSEEN]
    chance = random.Random(f"{subject} {held_out}")
    dealt = [itertools.cycle(chance.sample(seen, len(seen)))] * 3
    if held_out and subject == "ship":
        dealt[2] = itertools.cycle(sorted(UNSEEN))
    made = []
    for index in range(COUNTS[subject][held_out]):
        scene = Scene(chance, {"light": "night", "flag": "day"}.get(subject))
        turns = draw(scene, next(dealt[index % 3]))
        made.append((scene.image, turns))
    return made


def write(folder: Path, name: str, *, held_out: bool) -> None:
    """Write the rows of one part, in an order of chance, and their pictures beside them."""
    rows = []
    for subject in SUBJECTS:
        for index, (image, turns) in enumerate(pictures(subject, held_out), start=1):
            file = f"{name}/{subject}_{index:03}.png"
            (folder / name).mkdir(exist_ok=True)
            image.save(folder / file, optimize=True, bits=4)
            rows.append({"images": [file], "messages": turns})
    random.Random(0).shuffle(rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(lines, "utf-8")


if __name__ == "__main__":
    for name, held_out in {"pictures": False, "pictures_held_out": True}.items():
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        write(FOLDER, name, held_out=held_out)
