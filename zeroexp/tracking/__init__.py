"""What is kept of a run: always its files (`files`), and MLflow entries made from those files (`mlflow`)."""
