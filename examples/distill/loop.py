"""The training loop: updates, curves, evaluations, the best model, and checkpoints to go on from.

What is learned comes from outside: an objective, its batches by step, an evaluation. Since a batch and all randomness of a step depend on
seed and step only, a run that was killed and taken up again ends as one that was not. A state is saved only after its own loss was found
finite, so the last checkpoint is a good one. Knows nothing of drafters or features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from examples.distill.curves import draw_curves
from examples.distill.saved import CurveFile, Progress, load_state, save_state
from examples.distill.settings import TrainingSettings
from xpress_runtime.errors import CheckFailed, OptionError

STATE_NAME = "latest.pt"
_ADAM_BETAS = (0.9, 0.95)
LOSS = "loss"


class Movable(Protocol):
    def to(self, device: torch.device) -> Any: ...


@dataclass(frozen=True)
class Task:
    """What a loop trains.

    ``objective(batch)`` → scalars by name, of which "loss" has the gradient. ``batch(step)`` makes a step's batch. ``evaluate()`` →
    figures by name on held-out data, of which the first decides which checkpoint is best. ``keep(step, figures)`` writes that one. The
    loop calls objective and evaluation in the precision of the settings.
    """

    objective: nn.Module
    batch: Callable[[int], Movable]
    losses: tuple[str, ...]
    figures: tuple[str, ...]
    evaluate: Callable[[], dict[str, float]]
    keep: Callable[[int, dict[str, float]], None]


def run_loop(task: Task, settings: TrainingSettings, folder: Path, accelerator: Accelerator, report: Callable[[str], None]) -> Progress:
    """Train to the last step, from wherever ``folder`` stands. Raises CheckFailed at the first loss or gradient that is not finite."""
    return _Loop(task, settings, folder, accelerator, report).run()


class _Loop:
    def __init__(
        self, task: Task, settings: TrainingSettings, folder: Path, accelerator: Accelerator, report: Callable[[str], None]
    ) -> None:
        self._task, self._settings, self._folder, self._accelerator = task, settings, folder, accelerator
        self._report = report if accelerator.is_main_process else lambda _: None
        self._parameters = [parameter for parameter in task.objective.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in self._parameters if parameter.ndim > 1]
        vectors = [parameter for parameter in self._parameters if parameter.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=_ADAM_BETAS,
        )
        self._progress = self._take_up(optimizer)
        self._objective, self._optimizer = accelerator.prepare(task.objective, optimizer)
        self._curve = self._evaluations = None
        if accelerator.is_main_process:
            columns = ("step", "seconds", *task.losses, "gradient_norm", "learning_rate")
            self._curve = CurveFile(folder / "curve.csv", columns, self._progress.counted - 1)
            self._evaluations = CurveFile(folder / "evaluations.csv", ("step", "seconds", *task.figures), self._progress.evaluated)
        self._before = self._progress.seconds
        self._started = self._saved = time.monotonic()

    def _take_up(self, optimizer: torch.optim.Optimizer) -> Progress:
        found = load_state(self._folder / STATE_NAME)
        if found is None:
            return Progress()
        progress, model, optimizer_state = found
        if progress.step > self._settings.steps:
            raise OptionError(f"{self._folder} stands at step {progress.step}, and steps is {self._settings.steps}; set more steps")
        try:
            self._task.objective.load_state_dict(model)
            optimizer.load_state_dict(optimizer_state)
        except (RuntimeError, ValueError, KeyError) as problem:
            reason = " ".join(str(problem).split())
            raise OptionError(
                f"{self._folder / STATE_NAME} is of another model ({reason:.120}); remove its folder to begin again"
            ) from None
        self._report(f"goes on at step {progress.step} of {self._settings.steps}")
        return progress

    def run(self) -> Progress:
        settings, progress = self._settings, self._progress
        self._objective.train()
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self._task.batch, progress.step)
            # The last turn updates nothing: it finds the loss that goes with the last state.
            for step in range(progress.step, settings.steps + 1):
                batch = coming.result()
                if step < settings.steps:
                    coming = pool.submit(self._task.batch, step + 1)
                self._turn(step, batch.to(self._accelerator.device))
        self._report(
            f"{progress.step} steps in {progress.seconds / 60:.1f} minutes, {progress.evaluations} checkpoints evaluated, "
            f"best {self._task.figures[0]} {progress.best:.3f} at step {progress.best_step}"
        )
        return progress

    def _turn(self, step: int, batch: Any) -> None:
        settings, progress = self._settings, self._progress
        torch.manual_seed((settings.seed * 1_000_003 + step) * self._accelerator.num_processes + self._accelerator.process_index)
        rate = learning_rate(step, settings)
        self._optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            losses = self._objective(batch)
        self._accelerator.backward(losses[LOSS])
        norm = self._accelerator.clip_grad_norm_(self._parameters, settings.max_gradient_norm)
        found = self._mean_over_processes(losses)
        self._require_finite(step, found[LOSS], float(norm))
        self._note(step, {**found, "gradient_norm": float(norm), "learning_rate": rate})
        progress.step = step
        is_last = step == settings.steps
        evaluates = (is_last or step % settings.evaluate_steps == 0) and step > progress.evaluated and step > 0
        if evaluates:
            self._evaluate(step)
        if evaluates or is_last or self._is_due():
            self._save()
        if not is_last:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._accelerator.device.type, torch.bfloat16, enabled=self._settings.precision == "bfloat16")

    def _mean_over_processes(self, losses: dict[str, Tensor]) -> dict[str, float]:
        values = torch.stack([losses[name].detach().float() for name in self._task.losses])
        means: Tensor = self._accelerator.reduce(values, reduction="mean")
        return dict(zip(self._task.losses, means.tolist(), strict=True))

    def _require_finite(self, step: int, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        state = self._folder / STATE_NAME
        good = f"{state} holds the last good checkpoint" if state.is_file() else "no checkpoint had been written yet"
        raise CheckFailed(f'{what} at step {step}; {good}: lower learning_rate under [training], or set precision = "float32", and go on')

    def _note(self, step: int, values: dict[str, float]) -> None:
        """Add a step to the curve, a row for every ``log_steps`` of them. A step that is made again after a kill is in it already."""
        progress = self._progress
        if step < progress.counted:
            return
        progress.counted = step + 1
        progress.num_summed += 1
        for name, value in values.items():
            progress.sums[name] = progress.sums.get(name, 0.0) + value
        if (step + 1) % self._settings.log_steps and step < self._settings.steps:
            return
        row = {name: value / progress.num_summed for name, value in progress.sums.items()}
        progress.sums, progress.num_summed = {}, 0
        if self._curve is not None:
            self._curve.add({"step": step, "seconds": self._seconds(), **row})
        shown = ", ".join(f"{name} {row[name]:.3f}" for name in self._task.losses)
        self._report(f"step {step} of {self._settings.steps}: {shown}, {self._seconds():.0f} s")

    def _evaluate(self, step: int) -> None:
        progress = self._progress
        if self._evaluations is not None:
            self._objective.eval()
            with self._autocast():
                figures = self._task.evaluate()
            self._objective.train()
            self._evaluations.add({"step": step, "seconds": self._seconds(), **figures})
            reached = figures[self._task.figures[0]]
            shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
            self._report(f"step {step}, held out: {shown}" + (", the best so far" if reached > progress.best else ""))
            if reached > progress.best:
                self._task.keep(step, figures)
                progress.best, progress.best_step = reached, step
            draw_curves(self._folder, self._task.losses, self._task.figures)
        progress.evaluated = step
        progress.evaluations += 1
        self._accelerator.wait_for_everyone()

    def _is_due(self) -> bool:
        return time.monotonic() - self._saved >= 60 * self._settings.checkpoint_minutes

    def _save(self) -> None:
        self._progress.seconds = self._seconds()
        if self._accelerator.is_main_process:
            model = self._accelerator.unwrap_model(self._objective).state_dict()
            save_state(self._folder / STATE_NAME, self._progress, model, self._optimizer.state_dict())
        self._saved = time.monotonic()

    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._started


def learning_rate(step: int, settings: TrainingSettings) -> float:
    """Of the update at ``step``: linear warm-up, then half a cosine down to ``final_learning_rate`` of the highest."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    low = settings.final_learning_rate
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))
