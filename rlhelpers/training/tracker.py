"""An optional dashboard beside the records: wandb or trackio.  It never stops a run."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

from rlhelpers.training.config import RunConfig


class Tracker:
    """Both libraries share `init`, `log` and `finish`.  Whatever goes wrong is said once, and then it is silent.

    A run that goes on has the same `run_id` as before, and steps up to `tracked` are not logged a second time.  A step
    that was on its way there when the process was killed may be missing for ever.
    """

    def __init__(self, config: RunConfig, run_id: str | None = None, tracked: int = -1):
        self._library, self._tracked = None, tracked
        if config.tracker is not None:
            self._library = self._try("import", lambda: importlib.import_module(config.tracker))
            name = f"{config.variant}/seed={config.seed}"
            settings = config.model_dump(mode="json")
            # wandb knows a run by its id, trackio by its name.
            known = {"id": run_id} if config.tracker == "wandb" and run_id else {}
            known |= {"resume": "allow"} if tracked >= 0 else {}
            self._call("init", project=f"rlhelpers-{config.experiment}", name=name, config=settings, **known)

    def log(self, metrics: dict[str, Any]) -> None:
        known = {name: value for name, value in metrics.items() if value is not None}
        if metrics["step"] > self._tracked:
            self._call("log", known, step=metrics["step"])

    def close(self) -> None:
        self._call("finish")

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        if self._library is not None:
            self._try(name, lambda: getattr(self._library, name)(*args, **kwargs))

    def _try(self, what: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (Exception, SystemExit) as error:
            warnings.warn(f"tracker: {what} failed and is off from now on ({error!r})", stacklevel=3)
            self._library = None
