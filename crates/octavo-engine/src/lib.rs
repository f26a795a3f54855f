//! Runs the step: plan, lower, run, accept, commit. Owns the thread on which this happens.
//!
//! The control plane ([`octavo_sched`]: requests, tokens, block ids) and the data plane ([`octavo_backend`]: tensors)
//! meet only here. [`Engine`] is synchronous and can be stepped by hand; [`EngineHandle`] puts it on a thread and hands
//! results to [`Inbox`]es. Neither knows text.
#![forbid(unsafe_code)]

mod accept;
mod config;
mod engine;
mod error;
mod grammar;
mod handle;
mod inbox;
mod live;
mod lower;
mod masks;
mod rules;
mod worker;

pub use config::EngineConfig;
pub use engine::{Engine, Stats};
pub use error::{EngineDead, EngineError, SubmitError};
pub use grammar::{Grammar, GrammarError, GrammarState};
pub use handle::{Accepted, EngineHandle, Pooling, Submission};
pub use inbox::{Event, Finish, Inbox, Output, Story};
pub use live::Extras;
pub use octavo_backend::{TokenLogprobs, TokenMask};
pub use octavo_sched::{
    BeamParams, BlockState, FinishReason, Micros, PrefixCaching, RequestId, SamplingParams, TokenId,
};
