"""MLflow: the run that is active, or a new one in a local directory."""

import os
from pathlib import Path

import mlflow

from equipoise.sinks import Values


class MlflowRun:
    """Metrics of one run."""

    def __init__(self, client: mlflow.MlflowClient, run_id: str, *, ours: bool) -> None:
        self._client = client
        self._run_id = run_id
        self._ours = ours

    def log(self, values: Values, step: int) -> None:
        for key, value in values.items():
            self._client.log_metric(self._run_id, key, value, step=step)

    def close(self) -> None:
        if self._ours:
            self._client.set_terminated(self._run_id)


def opened(target: Path) -> MlflowRun:
    """Join the active run, or start one under the tracking server that is configured.

    Where none is configured, that is the directory ``target``.
    """
    active = mlflow.active_run()
    if active is not None:
        return MlflowRun(mlflow.MlflowClient(), active.info.run_id, ours=False)
    client = mlflow.MlflowClient(_tracking(target))
    return MlflowRun(client, _new_run(client, target.name), ours=True)


def _tracking(target: Path) -> str | None:
    if mlflow.is_tracking_uri_set():
        return None
    # Newer MLflow needs to know that files are meant; the skinny one has nothing else.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return target.resolve().as_uri()


def _new_run(client: mlflow.MlflowClient, name: str) -> str:
    found = client.get_experiment_by_name("equipoise")
    experiment = found.experiment_id if found else client.create_experiment("equipoise")
    return str(client.create_run(experiment, run_name=name).info.run_id)
