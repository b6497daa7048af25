"""The composition API has the signatures that were promised, word for word; more may be added by keyword only."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import numpy as np
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
AsyncAgent(algorithm, num_workers=4)
AsyncAgent.start_async_training()
AsyncAgent.stop_async_training()
MultiAgentLearner(agents)
MultiAgentLearner.train_agents(experiences)
MultiAgentLearner.get_best_agent(metric="reward")
MultiAgentLearner.ensemble_predict(state)
ParameterServer(initial_params, aggregation_method="average", update_frequency=10, save_frequency=100, checkpoint_path=None)
ParameterServer.register_worker(worker_id)
ParameterServer.unregister_worker(worker_id)
ParameterServer.get_parameters(worker_id)
ParameterServer.push_gradients(worker_id, gradients, weight=1.0)
ParameterServer.aggregate_gradients()
ParameterServer.broadcast_parameters()
ParameterServer.get_server_stats()
ParameterServer.save_checkpoint(path=None)
ParameterServer.load_checkpoint(path)
ParameterServer.start_server(host="localhost", port=8888)
ParameterServer.stop_server()
FederatedParameterServer.federated_averaging(worker_updates)
FederatedParameterServer.validate_worker_update(worker_id, update)
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
AsyncMainLoop(environment, replay_buffer, agent, param_server, num_workers=8)
AsyncMainLoop.run_async_training(total_steps=1_000_000)
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
    ours = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
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


PLAIN = {"str", "int", "float", "bool", "None", "Path"}
GIVEN: dict[str, Any] = {  # something right for arguments that have to be given
    "env_factory": "CartPole-v1", "policy": steppe.DistributedAgent("ppo"), "num_episodes": 1, "batch_size": 1,
    "new_policy_params": {}, "capacity": 4, "experience_keys": None, "experience": {}, "experiences": [], "indices": [0],
    "priorities": [1.0], "algorithm": "ppo", "batch": {}, "parameters": {}, "gradients": {}, "path": "x", "agents": {},
    "state": np.zeros(1), "initial_params": {}, "worker_id": "a", "worker_updates": {}, "update": {}, "episode": 1,
    "environment": steppe.DistributedEnvironment("CartPole-v1"), "replay_buffer": None,
    "agent": steppe.DistributedAgent("ppo"), "param_server": None,
    "action": 0, "reward": 0.0, "next_state": 0, "done": False,
}  # fmt: skip


def plain_arguments() -> list[tuple[str, str]]:
    """(what to call, argument) for everything promised that takes a number, a text or a truth."""
    pairs = []
    for line in PROMISED.split("\n")[1:-1]:
        name = line.partition("(")[0]
        taken = list(inspect.signature(found(name)).parameters.values())[1:]
        pairs += [(name, one.name) for one in taken if kinds_of(one.annotation) <= PLAIN]
    return pairs


def kinds_of(annotation: Any) -> set[str]:
    """What an annotation allows, whether it is still a text or was read already."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return {word.rpartition(".")[2] for word in text.split(" | ")}


@pytest.mark.parametrize(("name", "argument"), plain_arguments(), ids=lambda value: value)
def test_a_wrong_type_says_which_argument_of_which_method(name: str, argument: str) -> None:
    """Checked before the method does anything, so the object need not be ready for it."""
    function, (kind, _, method) = found(name), name.partition(".")
    needed = {
        parameter.name: GIVEN[parameter.name]
        for parameter in list(inspect.signature(function).parameters.values())[1:]
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    with pytest.raises(steppe.UsageError) as refused:
        function(object.__new__(getattr(steppe, kind)), **{**needed, argument: object()})
    words = str(refused.value)
    assert f"{method or '__init__'}() parameter {argument}=" in words, words


def test_the_list_of_arguments_is_not_empty() -> None:
    assert len(plain_arguments()) > 60
