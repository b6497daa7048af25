"""Training composed of its components: an environment, a replay buffer and an agent in a MainLoop.

python composition.py [EPISODES]
"""

import sys

from steppe import DistributedAgent, DistributedEnvironment, MainLoop, ReplayBufferPool

episodes = int(sys.argv[1]) if len(sys.argv) > 1 else 500

environment = DistributedEnvironment("CartPole-v1", num_workers=2)
replay_buffer = ReplayBufferPool(num_buffers=2, buffer_capacity=50_000)
agent = DistributedAgent("dqn", learning_rate=0.001, batch_size=64, update_frequency=4, target_update_frequency=250)

with environment:
    main_loop = MainLoop(environment, replay_buffer, agent, parameter_server=None)
    summary = main_loop.run_training(total_episodes=episodes, evaluation_frequency=100)
    print(f"{summary['updates']} updates in {summary['env_steps']} steps: {summary['eval_return_mean']:.1f}")

    # The components also work without the loop: collect, store, learn.
    experiences = environment.generate_experiences(agent, num_episodes=4)
    batch = replay_buffer.sample_batch(64)
    metrics = agent.learn_from_batch(batch)
    print(f"{len(experiences)} steps in 4 episodes; loss {metrics['loss']:.4f} on {len(batch['obs'])} transitions")
    print(f"evaluation: {main_loop.evaluate_policy(num_episodes=10)['return_mean']:.1f}")
