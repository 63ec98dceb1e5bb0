"""A run is kept as files (`files`), always, and as MLflow entries made from those files (`mlflow`)."""
