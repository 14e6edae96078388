"""Reports on run folders and comparisons, as HTML and Markdown.

`run_page`, `several_page` and `comparison_page` make the elements of `content`, with plots over
steps from `curves`; `figures` draws, `report` writes. Every number is a `Num`, linked to its file
and key.
"""
