"""Reports: run folders and comparisons as one page to read, share and check.

A page is first plain content (`content`), made from run folders by `run_page`, `several_page` and
`comparison_page`, with plots over steps (`curves`) that `figures` draws; `report` sets it as HTML
and Markdown. No number is typed in: each is a `Num` that knows the file and key it was read from.
"""
