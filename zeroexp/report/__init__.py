"""What sweeps cost and show: live progress, tables, figures, verdicts and a page, all from the folders of runs.

reading.py            folders -> runs; what is torn costs one line
measured_points.py    runs -> points: runs of one configuration are repeats; settings.py names them
columns.py            points -> the numbers of every table, with their units
  results_table.py, markdown.py, exports.py        terminal, Markdown, JSON, CSV and LaTeX
compare.py            points -> verdicts, doubts, broken claims
  statistics.py, loss_curves.py, differences.py          step times, losses, what else differs
theory.py             the stage's table in bytes, and explain_difference.py why runs differ from it
page/, figure.py      charts in HTML and one as SVG, in the colours of palette.py
sweep_progress.py     while a sweep runs
step_differences.py   the first verb and tensor in which two runs differ
"""
