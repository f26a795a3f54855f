//! Draws without a model, for whoever wants to see what they are distributed like.

use octavo_backend::{SampleRow, sampling};
use octavo_cpu::{isa::Isa, sampler::Sampler};
use pyo3::prelude::*;

use crate::errors::InvalidRequest;

/// How to draw, and how often.
#[derive(Debug, Clone, Copy, FromPyObject)]
#[pyo3(from_item_all)]
pub struct Draws {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    seed: u64,
    count: u32,
}

/// Draw tokens from one row of logits, at positions 0, 1, ...: as the `cpu` device does, or the `reference`.
#[pyfunction]
#[pyo3(signature = (logits, draws, *, device))]
pub fn draw_many(py: Python<'_>, logits: Vec<f32>, draws: Draws, device: &str) -> PyResult<Vec<u32>> {
    let Draws { temperature, top_k, top_p, min_p, seed, count } = draws;
    let row = SampleRow { temperature, top_k, top_p, min_p, seed, ..SampleRow::greedy(0, 0) };
    let draw = || match device {
        "cpu" => Some(Sampler::new(Isa::detect()).draw_many(&logits, &row, count)),
        "reference" => Some(sampling::draw_many(&logits, &row, count)),
        _ => None,
    };
    let unknown = || InvalidRequest::new_err(format!("device: found {device:?}, expected cpu or reference"));
    let drawn = py.detach(draw).ok_or_else(unknown)?;
    drawn.map_err(|error| InvalidRequest::new_err(format!("logits: {error}")))
}
