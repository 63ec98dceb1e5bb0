"""Command lines that nobody wrote: single words and pairs of them, drawn for every key by its type.

    python -m tests.fuzz --lines 2000            each line must be refused in one line, or accepted
    python -m tests.fuzz --lines 2000 --real     what is accepted also runs, on one rank
    python -m tests.fuzz --key train.seed        every single word of this key, and of those that begin so

words.py draws the lines, line.py tries one in a fork of this process, which has imported everything.
"""
