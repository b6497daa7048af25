"""Names that other libraries have for what is configured here, for hints in error messages."""

from __future__ import annotations

from collections.abc import Collection

_KEYS = {
    "lr": "learning_rate",
    "lrate": "learning_rate",
    "alpha": "learning_rate",
    "total_timesteps": "steps",
    "total_steps": "steps",
    "timesteps": "steps",
    "num_timesteps": "steps",
    "max_steps": "steps",
    "n_steps": "segment_steps",
    "num_steps": "segment_steps",
    "rollout_length": "segment_steps",
    "n_envs": "envs",
    "num_envs": "envs",
    "num_workers": "actors",
    "n_epochs": "epochs",
    "update_epochs": "epochs",
    "num_sgd_iter": "epochs",
    "batch_size": "minibatch_size",
    "sgd_minibatch_size": "minibatch_size",
    "clip_range": "clip",
    "clip_coef": "clip",
    "ent_coef": "entropy_coef",
    "vf_coef": "value_coef",
    "lambda": "gae_lambda",
    "train_freq": "samples_per_insert",
    "target_update_interval": "target_every",
    "target_network_frequency": "target_every",
    "exploration_initial_eps": "epsilon_start",
    "exploration_final_eps": "epsilon_end",
    "policy_kwargs": "hidden",
    "net_arch": "hidden",
    "hidden_sizes": "hidden",
    "layers": "hidden",
    "norm_obs": "normalize_obs",
    "norm_reward": "normalize_reward",
    "eval_freq": "evaluation.every_steps",
    "n_eval_episodes": "evaluation.episodes",
    "env_kwargs": "environment.kwargs",
    "env_id": "env",
    "algorithm": "algo",
    "random_seed": "seed",
}
_SENTENCES = {
    "verbose": "The progress is always shown, in a terminal as a live view: leave it out.",
    "policy": "The network follows from the observations: leave it out, or set network and hidden.",
    "tensorboard_log": "Every run has its curves for TensorBoard in its directory: leave it out.",
}
_EXAMPLES = {
    "hidden": ", the width of each hidden layer: hidden=[64, 64]",
    "environment.kwargs": ", the arguments of the environment's constructor",
}
_ALGORITHMS = {
    "sac": "ppo",
    "td3": "ppo",
    "ddpg": "ppo",
    "trpo": "ppo",
    "ppo2": "ppo",
    "recurrentppo": "ppo",
    "recurrent_ppo": "ppo",
    "qrdqn": "dqn",
    "rainbow": "dqn",
    "c51": "dqn",
}
_WHAT = {
    "ppo": "for continuous actions there is 'ppo', with recurrent=true if it needs a memory",
    "dqn": "for discrete actions there is 'dqn', with prioritized, dueling and n_step",
}


def key_hint(key: str, known: Collection[str]) -> str:
    """Return `" Did you mean …"` for a key of another library; empty if the name is unknown or leads to none of `known`."""
    name = key.rpartition(".")[2].lower()
    if name in _SENTENCES:
        return f" {_SENTENCES[name]}"
    meant = _KEYS.get(name, "")
    return f" Did you mean {meant!r}{_EXAMPLES.get(meant, '')}?" if meant in known else ""


def algorithm_hint(algo: str, known: Collection[str]) -> str:
    """Return what to use in place of an algorithm that other libraries have."""
    meant = _ALGORITHMS.get(algo.lower(), "")
    return f" In its place, {_WHAT[meant]}." if meant in known else ""
