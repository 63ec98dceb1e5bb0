"""A run is kept as files (`files`), always, and as MLflow entries made from those files (`mlflow`).

What is sent: each step's figures (`mlflow_metrics`), names and settings (`mlflow_labels`), what a sweep's page of MLflow
shows (`mlflow_views`), into a store (`mlflow_store`). A sweep sends them (`mlflow_uploads`), or a process beside a job's
first task (`mlflow_live`).
"""
