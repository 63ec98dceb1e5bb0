"""What a run will cost, before it runs: predict.py has the closed forms of bytes sent and bytes held."""
