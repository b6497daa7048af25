"""Build a plan, launch it, supervise it and finish it: MainLoop and the parts that users compose."""
