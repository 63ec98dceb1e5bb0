"""What a run will cost, computed before it runs: predict.py has the closed forms of bytes sent and bytes held."""
