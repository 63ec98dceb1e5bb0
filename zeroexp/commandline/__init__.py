"""Arguments of the command line are checked before Hydra reads them, and a mistake is one line.

commands.py          which module a verb runs
check_arguments.py   what Hydra would answer with a traceback, ignore, or write down
mistakes.py          the line that explains what was raised; help.py: the screens of help
"""
