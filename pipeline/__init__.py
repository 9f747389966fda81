"""The core: types, configuration, store, objectives and engines. Knows no Prefect, no stage, no dataset."""
