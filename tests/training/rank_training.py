"""A whole training with rank adaptation, as a loop of one's own does it."""

from hf_comera import RankAdapter


def train_ranks(model, optimizer, settings, steps, new_loss, schedule=None):
    """Train a model that has gates on what ``new_loss()`` gives at each step; returns the last loss."""
    adapter = RankAdapter(model, optimizer, settings, total_steps=steps)
    for _ in range(steps):
        loss = new_loss()
        loss.backward()
        adapter.before_step(loss)
        optimizer.step()
        adapter.after_step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    adapter.finish()
    return loss.item()
