"""Prefect flows, the service, and the command line: the only room that imports Prefect."""
