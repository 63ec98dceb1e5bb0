"""What is kept of a run: files always (`files`), MLflow from those files (`mlflow`)."""
