"""The best model so far, on disk: as users load it, with whatever ranks it had then."""

import shutil
from pathlib import Path

from train_loop import Run


class BestModel:
    """Keeps the model with the highest value of a held-out figure; of equals that with the lower held-out loss.

    Models from before the ranks had their final size do not count.

    Args:
        folder: Where it is kept.
        figure: Name of the figure.
    """

    def __init__(self, folder: Path, figure: str = "accuracy") -> None:
        self.folder, self.figure = folder, figure

    def consider(self, run: Run) -> None:
        """Keep the model of this moment if it is better than all before it."""
        if run.step < run.first_choice:
            return
        *before, now = self._worth(run)
        if all(now > other for other in before) and run.accelerator.is_main_process:
            part = self.folder.with_name(f"{self.folder.name}.part")  # an interruption leaves no half model
            shutil.rmtree(part, ignore_errors=True)
            try:
                run.accelerator.unwrap_model(run.model).save_pretrained(part)
                shutil.rmtree(self.folder, ignore_errors=True)
                part.rename(self.folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        run.accelerator.wait_for_everyone()

    def kept(self) -> Path:
        """The folder, from which the model can be loaded.

        Raises:
            ValueError: If somebody has removed it.
        """
        if not (self.folder / "config.json").is_file():
            raise ValueError(
                f"{self.folder}, where the best model was kept, is gone: the output folder was removed while the run "
                "went on. Resume from a checkpoint, which holds that model, or start again."
            )
        return self.folder

    def step(self, run: Run) -> int:
        """After how many steps it was kept."""
        worth = self._worth(run)
        return run.history.held_out[worth.index(max(worth)) - len(worth)][0]

    def _worth(self, run: Run) -> list[tuple[float, float]]:
        """How good the model was each time it was measured since it could be chosen; more is better."""
        values = zip(run.history.figures[self.figure], run.history.held_out, strict=True)
        return [(value, -loss) for (step, value), (_, loss) in values if step >= run.first_choice]
