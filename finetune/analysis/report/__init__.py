"""Reports: what run folders hold, as one page to read, share and check.

A page is first plain content (`content`), made from run folders by `run_*`, `health`,
`several` and `comparison_sections`, then drawn (`figures`) and set (`writer`) as HTML and Markdown.
No number is typed in: each is a `Num` that knows the file and key it was read from.
"""
