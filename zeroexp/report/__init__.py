"""What sweeps cost and show: live progress, tables, figures, verdicts and a page, all from the folders of runs.

reading.py            folders -> runs; what is torn costs one line
measured_points.py    runs -> points: runs of one configuration are repeats
statistics.py         how well a step time is known, which of two is faster or reaches another quality
loss_agreement.py     whether loss curves agree, and fall
exact_numbers.py      bytes, counts and losses that no repeat may change
differences.py        what else differs beside what is compared
claims.py             what a study claims of its points
conclusions.py        points -> verdicts beside a reference, doubts, broken claims
moved_points.py       which points moved between two sweeps
headline.py           what ran, and the numbers that a reader wants first
columns.py            points -> the numbers of every table and export, with keys and units
  meanings.py         what they mean, below every table
  tables.py           a table as text, Markdown, LaTeX and HTML
  results_table.py, markdown.py, exports.py        for terminals, pages, programs
writing.py            a file that can not be written costs one line
page/, figure.py      charts in HTML, and the same on paper, in the colours of palette.py
sweep_progress.py     while a sweep runs
"""
