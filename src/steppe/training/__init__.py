"""Building a plan, running it, stopping it: MainLoop and the parts that users compose."""
