"""The policies that ship with the package, one TOML file each."""
