"""Learner, actors and a global buffer on Ray. Only the learner changes weights; actors fetch them and send whole episodes."""

import gymnasium as gym
import ray
import torch

from steppe.replay import GlobalBuffer, LocalBuffer, Windowing


class Learner:
    def __init__(self, buffer):
        self.buffer, self.model, self.target = buffer, torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.store_weights()

    def store_weights(self):
        self.weights = ray.put({name: value.numpy().copy() for name, value in self.model.state_dict().items()})
        self.target.load_state_dict(self.model.state_dict())

    def train(self):
        for _ in range(5):
            batch = ray.get(self.buffer.get_batch.remote())
            obs, action, reward, terminated, *_ = (torch.tensor(column) for column in batch)
            q = self.model(obs[0, :, 0]).gather(1, action[0][:, None])[:, 0]
            target = reward[0] + 0.99 * ~terminated[0] * self.target(obs[1, :, 0]).max(1)[0].detach()
            loss = (torch.tensor(batch.weights) * torch.nn.functional.huber_loss(q, target, reduction="none")).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()  # the only place where weights change
            self.buffer.update_priorities.remote(batch.indices, (q - target).abs().detach().numpy() + 1e-3)
        self.store_weights()


class Actor:
    def __init__(self, buffer):
        self.buffer, self.model, self.env = buffer, torch.nn.Linear(4, 2), gym.make("CartPole-v1")

    def update_weights(self, weights):
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    def run(self, weights):
        self.update_weights(weights)
        obs, terminated, truncated = self.env.reset()[0], False, False
        local = LocalBuffer(obs[None])
        while not (terminated or truncated):
            q_val = self.model(torch.tensor(obs)).detach().numpy()
            action = int(q_val.argmax()) if torch.rand(1) > 0.2 else self.env.action_space.sample()
            obs, reward, terminated, truncated, _ = self.env.step(action)
            local.add(action, reward, obs[None], [[0.0]], [[True]], q_val)
        ray.get(self.buffer.add.remote(local.finish(terminated=terminated)))


ray.init("local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
buffer = ray.remote(GlobalBuffer).remote(50_000, Windowing(length=1, n_step=1), batch_size=64)
learner, actors = Learner(buffer), [ray.remote(Actor).remote(buffer) for _ in range(2)]
for _ in range(20):
    ray.get([actor.run.remote(learner.weights) for actor in actors])
    learner.train()
print(f"20 rounds of {len(actors)} actors and one learner, {ray.get(buffer.__len__.remote())} rows in the buffer")
