"""Reports on run folders and comparisons, as HTML.

`run_page` and `comparison_page` make the tables and plots (`elements`, `curves`) that `templates`
set between sentences; `figures` draws, `report` writes. Every number is a `Num`, linked to its file
and key.
"""
