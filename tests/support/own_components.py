"""Components of a user's own: a world, a memory, an agent and a server in a few lines of NumPy, with nothing of the house."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

CONTEXTS, LENGTH = 3, 5


class OwnEnvironment:
    """Asks for the context's number, five times an episode."""

    def __init__(self, seed=0):
        self.stream, self.episodes, self.steps, self.parameters = np.random.default_rng(seed), 0, 0, {}

    def generate_experiences(self, policy, num_episodes, max_steps_per_episode=1000):
        return [step for _ in range(num_episodes) for step in self._episode(policy, min(LENGTH, max_steps_per_episode))]

    def generate_batch_experiences(self, policy, batch_size):
        steps = [step for _ in range(-(-batch_size // LENGTH)) for step in self._episode(policy, LENGTH)][:batch_size]
        return {key: np.stack([step[key] for step in steps]) for key in steps[0]}

    def _episode(self, policy, length):
        observations = np.eye(CONTEXTS, dtype=np.float32)[self.stream.integers(CONTEXTS, size=length + 1)]
        self.episodes += 1
        self.steps += length
        for t in range(length):
            action = policy.choose(observations[t], self.stream)
            yield {
                "obs": observations[t], "action": np.int64(action), "reward": np.float32(action == observations[t].argmax()),
                "next_obs": observations[t + 1], "terminated": np.bool_(t == length - 1), "truncated": np.bool_(False),
            }  # fmt: skip

    def update_policy(self, new_policy_params):
        self.parameters = dict(new_policy_params)

    def reset_environments(self):
        pass

    def get_environment_stats(self):
        return {"episodes": self.episodes, "steps": self.steps}

    def shutdown(self):
        pass


class OwnPool:
    """A list."""

    def __init__(self):
        self.kept, self.random = [], random.Random(0)

    def add_experiences(self, experiences, buffer_id=None):
        self.kept += list(experiences)

    def sample_batch(self, batch_size, buffer_id=None):
        drawn = self.random.choices(self.kept, k=batch_size)
        return {key: np.stack([np.asarray(step[key]) for step in drawn]) for key in drawn[0]}

    def get_buffer_stats(self):
        return {"size": len(self.kept)}

    def clear_all_buffers(self):
        self.kept = []

    def save_buffers(self, path=None):
        plain = [{key: np.asarray(value).tolist() for key, value in step.items()} for step in self.kept]
        Path(path).write_text(json.dumps(plain))

    def load_buffers(self, path=None):
        self.kept = [{k: np.asarray(v) for k, v in step.items()} for step in json.loads(Path(path).read_text())]

    def get_total_experiences(self):
        return len(self.kept)

    def balance_buffers(self):
        pass


class OwnAgent:
    """A table of logits, improved along the rewards' gradient."""

    def __init__(self, rate=2.0):
        self.logits, self.rate, self.updates = np.zeros((CONTEXTS, CONTEXTS), np.float32), rate, 0

    def chances(self, obs):
        odds = np.exp(obs @ self.logits)
        return odds / odds.sum(axis=-1, keepdims=True)

    def choose(self, obs, stream):
        chances = self.chances(obs).astype(np.float64)
        return stream.choice(CONTEXTS, p=chances / chances.sum())

    def compute_gradients(self, batch):
        taken = np.eye(CONTEXTS, dtype=np.float32)[batch["action"]]
        gain = (batch["reward"] - 1.0 / CONTEXTS)[:, None]
        return {"logits": -(batch["obs"].T @ ((taken - self.chances(batch["obs"])) * gain)) / len(gain)}

    def apply_gradients(self, gradients):
        self.logits = self.logits - np.float32(self.rate) * gradients["logits"]
        self.updates += 1

    def learn_from_batch(self, batch):
        self.apply_gradients(self.compute_gradients(batch))
        return {"updates": 1}

    def update_policy(self, experiences):
        return self.learn_from_batch({k: np.stack([np.asarray(s[k]) for s in experiences]) for k in experiences[0]})

    def get_policy_parameters(self):
        return {"logits": self.logits.copy()}

    def set_policy_parameters(self, parameters):
        self.logits = np.array(parameters["logits"])

    def evaluate_policy(self, num_episodes=10):
        right = self.chances(np.eye(CONTEXTS, dtype=np.float32)).argmax(axis=1) == np.arange(CONTEXTS)
        return {"return_mean": LENGTH * float(right.mean()), "episodes": num_episodes}

    def save_checkpoint(self, path):
        Path(path).write_text(json.dumps(self.logits.tolist()))

    def load_checkpoint(self, path):
        self.logits = np.array(json.loads(Path(path).read_text()), np.float32)

    def get_training_stats(self):
        return {"updates": self.updates}

    def reset_training_stats(self):
        self.updates = 0


class OwnServer:
    """A dictionary, and the mean of what was pushed; one push is enough for an update if it is told so."""

    def __init__(self, initial, at_once=None):
        self.values, self.at_once = {name: array.copy() for name, array in initial.items()}, at_once
        self.workers, self.pushed, self.mean, self.accepted = set(), [], None, 0

    def register_worker(self, worker_id):
        new = worker_id not in self.workers
        self.workers.add(worker_id)
        return new

    def unregister_worker(self, worker_id):
        known = worker_id in self.workers
        self.workers.discard(worker_id)
        return known

    def get_parameters(self, worker_id):
        return {name: array.copy() for name, array in self.values.items()}

    def push_gradients(self, worker_id, gradients, weight=1.0):
        if worker_id not in self.workers:
            return False
        self.pushed.append(gradients)
        self.accepted += 1
        if self.at_once is not None:
            self.update_parameters(self.at_once)
        return True

    def aggregate_gradients(self):
        self.mean = {name: np.mean([push[name] for push in self.pushed], axis=0) for name in self.values}
        self.pushed = []
        return self.mean

    def update_parameters(self, learning_rate=0.001):
        mean = self.mean if self.mean is not None else self.aggregate_gradients()
        self.values = {name: array - np.float32(learning_rate) * mean[name] for name, array in self.values.items()}
        self.mean = None

    def broadcast_parameters(self):
        pass

    def get_server_stats(self):
        return {"accepted": self.accepted}
