"""A run is kept as files (`files`), always, and as MLflow entries made from those files (`mlflow`).

A sweep sends them (`mlflow_uploads`), or a process beside a job's first task (`mlflow_live`).
"""
