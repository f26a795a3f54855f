//! What a device must be able to do, and the plainest way to do it.
//!
//! A model is data ([`DecoderSpec`] and the weights of a [`WeightSource`]); a [`Backend`] executes it one step at a
//! time ([`StepInputs`] in, [`StepResult`] out). [`Reference`] is the executable specification: it walks the spec
//! operation by operation in naive `f32`. [`conformance`] compares any backend with it.
//!
//! Nothing in this crate knows requests, text or files.
#![forbid(unsafe_code)]

mod backend;
pub mod conformance;
mod error;
pub mod numerics;
mod reference;
pub mod sampling;
mod spec;
mod step;
mod weights;

pub use backend::{Backend, Footprint, StepLimits};
pub use error::BackendError;
pub use numerics::{InputRounding, KvType, Numerics, Sums, WeightRounding};
pub use reference::{Reference, ReferencePlan};
pub use spec::{
    Activation, AttentionSpec, DecoderSpec, HeadSpec, KvGeometry, KvGroup, LayerSpec, MlpSpec, NormSpec, RopeSpec,
    WeightShape,
};
pub use step::{
    BlockCopy, GroupInputs, LEAST_LOGPROB, LogitRules, Penalties, SampleError, SampleRow, Sampled, ScoreRow, SeenToken,
    SpanInput, StepInputs, StepResult, TokenLogprobs, TokenMask,
};
pub use weights::{Codes, Matrix, ScaledCodes, WeightData, WeightFormat, WeightGroup, WeightId, WeightSource};

/// A token's id in the model's vocabulary.
pub type TokenId = u32;
