"""The composition API has the signatures that were promised, word for word; more may be added by keyword only."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

import steppe

pytestmark = pytest.mark.unit

PROMISED = """
DistributedEnvironment(env_factory, num_workers=4, use_gpu=False, device=None)
DistributedEnvironment.generate_experiences(policy, num_episodes, max_steps_per_episode=1000)
DistributedEnvironment.generate_batch_experiences(policy, batch_size)
DistributedEnvironment.update_policy(new_policy_params)
DistributedEnvironment.reset_environments()
DistributedEnvironment.get_environment_stats()
DistributedEnvironment.shutdown()
ReplayBuffer(capacity, experience_keys)
ReplayBuffer.add(experience)
ReplayBuffer.add_batch(experiences)
ReplayBuffer.sample(batch_size)
ReplayBuffer.clear()
ReplayBuffer.size()
ReplayBuffer.is_full()
PrioritizedReplayBuffer(capacity, experience_keys, alpha=.6, beta=.4, beta_increment=.001)
PrioritizedReplayBuffer.add(experience, priority=1.0)
PrioritizedReplayBuffer.sample(batch_size)
PrioritizedReplayBuffer.update_priorities(indices, priorities)
ReplayBufferPool(num_buffers=4, buffer_capacity=100_000, experience_keys=None, use_prioritized=False, save_path=None)
ReplayBufferPool.add_experiences(experiences, buffer_id=None)
ReplayBufferPool.sample_batch(batch_size, buffer_id=None)
ReplayBufferPool.get_buffer_stats()
ReplayBufferPool.clear_all_buffers()
ReplayBufferPool.save_buffers(path=None)
ReplayBufferPool.load_buffers(path=None)
ReplayBufferPool.get_total_experiences()
ReplayBufferPool.balance_buffers()
DistributedAgent(algorithm, learning_rate=.001, batch_size=32, update_frequency=4, target_update_frequency=100, use_gpu=False, device=None)
DistributedAgent.learn_from_batch(batch)
DistributedAgent.update_policy(experiences)
DistributedAgent.get_policy_parameters()
DistributedAgent.set_policy_parameters(parameters)
DistributedAgent.compute_gradients(batch)
DistributedAgent.apply_gradients(gradients)
DistributedAgent.evaluate_policy(num_episodes=10)
DistributedAgent.save_checkpoint(path)
DistributedAgent.load_checkpoint(path)
DistributedAgent.get_training_stats()
DistributedAgent.reset_training_stats()
MainLoop(environment, replay_buffer, agent, parameter_server=None, config=None)
MainLoop.run_training(total_episodes=1000, max_steps_per_episode=1000, evaluation_frequency=100, checkpoint_frequency=500)
MainLoop.run_single_episode()
MainLoop.evaluate_policy(num_episodes=10)
MainLoop.save_checkpoint(episode, path=None)
MainLoop.load_checkpoint(path)
MainLoop.get_training_progress()
MainLoop.stop_training()
MainLoop.pause_training()
MainLoop.resume_training()
DistributedMainLoop(environment, replay_buffer, agent, param_server, node_id="node-0", cluster_config=None)
DistributedMainLoop.run_distributed_training(total_episodes=1000)
DistributedMainLoop.synchronize_with_cluster()
ExperienceBuffer(capacity=10000)
ExperienceBuffer.push(state, action, reward, next_state, done)
ExperienceBuffer.sample(batch_size)
"""


def found(name: str) -> Any:
    """The function behind a name of the list; for a class, its constructor."""
    kind, _, method = name.partition(".")
    return getattr(getattr(steppe, kind), method or "__init__")


@pytest.mark.parametrize("line", PROMISED.split("\n")[1:-1], ids=lambda line: line.partition("(")[0])
def test_signature_is_the_promised_one(line: str) -> None:
    name, _, arguments = line.partition("(")
    wanted = ast.parse(f"def f({arguments}: ...").body[0].args
    defaults = [ast.literal_eval(value) for value in wanted.defaults]
    promised = [argument.arg for argument in wanted.args]
    parameters = list(inspect.signature(found(name)).parameters.values())[1:]
    ours = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert [p.name for p in ours] == promised
    assert [p.default for p in ours if p.default is not p.empty] == defaults
    assert all(p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY)


@pytest.mark.parametrize(
    "call",
    [
        lambda: steppe.DistributedEnvironment("CartPole-v1", "four"),
        lambda: steppe.DistributedEnvironment(3),
        lambda: steppe.DistributedAgent("ppo", learning_rate="fast"),
        lambda: steppe.DistributedAgent(None),
        lambda: steppe.MainLoop("CartPole-v1", None, steppe.DistributedAgent("ppo")),
        lambda: steppe.evaluate("run", episodes=2.5),
        lambda: steppe.train(env=7),
        lambda: steppe.ReplayBuffer("many", None),
        lambda: steppe.ReplayBufferPool(num_buffers=2.5),
    ],
)
def test_wrong_types_are_refused_as_usage_errors(call) -> None:
    with pytest.raises(steppe.UsageError, match="violates type hint"):
        call()
