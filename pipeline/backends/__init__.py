"""The learning and sampling engines behind pipeline.protocols."""
