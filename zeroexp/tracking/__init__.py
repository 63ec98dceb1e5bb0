"""A run is kept as files (`files`), always, and as MLflow entries made from those files (`mlflow`).

What is sent: figures of each step (`mlflow_metrics`), names and settings (`mlflow_labels`), and what its page shows of
a sweep (`mlflow_views`), all into a store (`mlflow_store`). A sweep sends them (`mlflow_upload_thread`), or a process
beside the first task of a job (`mlflow_live`).
"""
