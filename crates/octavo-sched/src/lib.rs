//! Decides, each iteration, which tokens of which sequences to compute and in which KV blocks they live.
//!
//! A [`Request`] is admitted with [`Scheduler::add`], or refused at once with the reason. Each iteration is
//! [`Scheduler::schedule`], which gives a [`StepPlan`], then whatever runs the model, then [`Scheduler::commit`] with
//! the sampled tokens, which gives a [`StepOutput`] for each sequence that moved on.
//!
//! Everything here is pure and synchronous: no clock, no randomness, no logging, no threads. Time comes in as an
//! argument, so that a day of traffic can be simulated in a second, and equal calls give equal plans.
//!
//! | module | holds |
//! | --- | --- |
//! | `request` | what a caller asks for |
//! | `rejected` | why it may be refused |
//! | `config` | the scheduler's limits, and the one function that checks a request against them |
//! | `block` | reference-counted KV blocks |
//! | `table` | the table through which a sequence owns blocks |
//! | `prefix` | the tree of token blocks that have been computed |
//! | `cache` | the pools of all layer groups under that tree: the KV cache |
//! | `sequence` | the tokens of one continuation and where their keys and values are |
//! | `beam` | the state of a beam search |
//! | `headroom` | how long outputs are expected to become |
//! | `plan` | what goes to the model runner and what comes back |
//! | `scheduler` | the iteration-level scheduler: steps, admission, preemption |
//! | `stats` | a snapshot of counts |
#![forbid(unsafe_code)]

mod beam;
mod block;
mod cache;
mod config;
mod headroom;
mod plan;
mod prefix;
mod rejected;
mod request;
mod scheduler;
mod sequence;
mod stats;
mod table;

pub use block::{BlockPool, VACANT_BLOCK};
pub use config::{AdmissionLimits, GroupConfig, PrefixCaching, SchedulerConfig, VictimOrder};
pub use plan::{Admitted, BlockCopy, Candidate, FinishReason, Hypothesis, SeqSpan, StepOutput, StepPlan, StepRun};
pub use rejected::{InvalidParam, Limit, Rejected};
pub use request::{BeamParams, Micros, Request, RequestId, SamplingParams, SeqId, TokenId};
pub use scheduler::Scheduler;
pub use sequence::Sequence;
pub use stats::{BlockState, FinishCounts, SchedulerStats};
pub use table::BlockTable;
