//! The small model that benchmarks run.

use std::path::PathBuf;

use octavo_backend::{WeightFormat, WeightGroup, WeightId, WeightSource};
use octavo_model::Checkpoint;

/// Opens SmolLM2-135M as `make pull` leaves it.
///
/// # Panics
/// If it is not there.
pub fn open() -> Checkpoint {
    let home = std::env::var_os("OCTAVO_HOME")
        .map(PathBuf::from)
        .unwrap_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache").join("octavo"));
    let path = home.join("models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf");
    Checkpoint::open(&path).unwrap_or_else(|error| panic!("{error}; `make pull` fetches the model"))
}

/// The format of the widest matrix of its first layer.
///
/// # Panics
/// If it has none.
pub fn layer_format(checkpoint: &mut Checkpoint) -> WeightFormat {
    match checkpoint.weight(WeightId::GateUp(0)) {
        Ok(WeightGroup::Matrices(parts)) => parts[0].data.format,
        other => panic!("the MLP of the first layer: found {other:?}, expected matrices"),
    }
}
