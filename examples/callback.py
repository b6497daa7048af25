"""A callback is called about five times a second with the state of the run. It can add metrics and stop the run.

python callback.py [RETURN]
"""

import sys

import steppe

target_return = float(sys.argv[1]) if len(sys.argv) > 1 else 150.0


def seconds_per_episode(view: steppe.RunView) -> dict[str, float]:
    """Is written to metrics.jsonl and TensorBoard as custom/seconds_per_episode."""
    return {"seconds_per_episode": view.train_s / view.episodes} if view.episodes else {}


def stop_early(view: steppe.RunView) -> bool:
    return (view.train_return_mean or 0.0) >= target_return


callbacks = [seconds_per_episode, stop_early]
result = steppe.train("CartPole-v1", runtime="inline", steps=2_000_000, callbacks=callbacks)
print(f"{result.state} ({result.reason}) after {result.env_steps:,} steps at {result.train_return_mean:.1f}")
