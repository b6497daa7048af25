"""TicTacToe as a Gymnasium, vector and PettingZoo environment."""
