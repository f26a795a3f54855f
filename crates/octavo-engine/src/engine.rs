//! One step of the engine.

use std::{collections::HashMap, time::Instant};

use octavo_backend::{Backend, BackendError, DecoderSpec, StepResult, TokenLogprobs, WeightSource};
use octavo_sched::{
    AdmissionLimits, BlockState, FinishReason, Micros, Rejected, Request, RequestId, Scheduler, SchedulerStats, SeqId,
    SeqSpan, Sequence, StepOutput, StepPlan, TokenId,
};

use crate::{
    EngineConfig, EngineError, Extras, Finish, Output, Pooling, Story,
    accept::{self, accept},
    live::{LiveRequest, PromptReport},
    lower::{Lowered, lower},
    masks::MaskThreads,
    rules::RequestRules,
};

/// A model, a scheduler and a clock: everything needed to serve, on the caller's thread.
pub struct Engine<B: Backend> {
    scheduler: Scheduler,
    backend: B,
    plan: B::Plan,
    num_groups: usize,
    vocab_size: usize,
    hidden_size: usize,
    seed: u64,
    clock: Instant,
    eos_token_ids: Vec<TokenId>,
    masks: MaskThreads,
    requests: HashMap<RequestId, LiveRequest>,
    stats: Stats,
}

/// Counts since the engine started, and a snapshot of the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// The scheduler's own counts.
    pub scheduler: SchedulerStats,
    /// Prompt tokens of all requests taken in.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generation_tokens: u64,
    /// Time spent in steps.
    pub busy: Micros,
    /// Draws before which a grammar was asked.
    pub masks: u64,
    /// How long that took, in nanoseconds; it is part of `busy`.
    pub mask_nanos: u64,
    /// Most blocks that were in use after any step.
    pub most_blocks_used: usize,
    /// Token slots allocated, summed over steps; with [`Stats::slot_steps_used`] the mean waste.
    pub slot_steps_allocated: u64,
    /// Token slots holding a computed token, summed over steps.
    pub slot_steps_used: u64,
    /// Allocated slots that their owner might fill yet, summed over steps.
    pub slot_steps_reserved: u64,
    /// Allocated slots that stay empty, summed over steps.
    pub slot_steps_internal: u64,
    /// Free slots beside a waiting request that they are too few for, summed over steps.
    pub slot_steps_external: u64,
}

impl<B: Backend> Engine<B> {
    /// Loads a model into `backend`; all memory is taken here.
    ///
    /// # Errors
    /// A configuration that cannot serve anything, or whatever the backend cannot load.
    pub fn load(
        backend: B,
        spec: &DecoderSpec,
        weights: &mut dyn WeightSource,
        config: EngineConfig,
    ) -> Result<Engine<B>, BackendError> {
        let scheduler = config.scheduler(spec);
        scheduler.validate().map_err(|invalid| BackendError::Unsupported {
            what: invalid.field,
            found: invalid.found,
            expected: invalid.expected.to_owned(),
        })?;
        let plan = backend.load(spec, weights, &config.step_limits())?;
        let eos_token_ids = config.eos_token_ids.clone();
        Ok(Engine {
            scheduler: Scheduler::new(scheduler),
            backend,
            plan,
            num_groups: config.num_blocks.len(),
            vocab_size: spec.vocab_size,
            hidden_size: spec.hidden_size,
            seed: config.seed,
            clock: Instant::now(),
            eos_token_ids,
            masks: MaskThreads::new(config.mask_threads),
            requests: HashMap::new(),
            stats: Stats::default(),
        })
    }

    /// Queues a request.
    ///
    /// # Errors
    /// What the scheduler can never run. The caller has checked token ids against the vocabulary.
    pub fn add(&mut self, request: Request) -> Result<(), Rejected> {
        self.add_with(request, Extras::default())
    }

    /// Queues a request that asks for more than the scheduler need know of.
    ///
    /// # Errors
    /// As [`Engine::add`].
    pub fn add_with(&mut self, mut request: Request, extras: Extras) -> Result<(), Rejected> {
        let Extras { grammar, pooling } = extras;
        let (id, arrival, prompt_tokens) = (request.id, request.arrival, request.prompt.len());
        let params = &mut request.params;
        let rules = RequestRules::new(params, grammar, &self.eos_token_ids, self.vocab_size);
        // The rules let the end token through where the grammar ends, and then it counts.
        params.ignore_eos &= !rules.as_ref().is_some_and(RequestRules::has_grammar);
        // What is to be reported has to be computed.
        params.skip_reading_prefix_cache |= params.prompt_logprobs.is_some() || pooling == Some(Pooling::Mean);
        let prompt = PromptReport::new(params.prompt_logprobs, pooling);
        self.scheduler.add(request)?;
        self.stats.prompt_tokens += prompt_tokens as u64;
        let story = Story { arrival, ..Story::default() };
        self.requests.insert(id, LiveRequest { story, rules, prompt, ..LiveRequest::default() });
        Ok(())
    }

    /// Ends a request and takes its blocks home; an output for each continuation that had not ended.
    pub fn end(&mut self, id: RequestId, reason: FinishReason) -> Vec<Output> {
        let choices = self.scheduler.end(id, reason);
        let story = self.requests.remove(&id).unwrap_or_default().story;
        let last = choices.last().copied();
        let output = |choice| Output { last: Some(choice) == last, ..Output::ended(id, choice, reason, story) };
        choices.into_iter().map(output).collect()
    }

    /// Ends one continuation, in whose text a stop string was found; an output if it had not ended.
    pub fn stop(&mut self, id: RequestId, choice: u32) -> Option<Output> {
        let last = self.scheduler.end_choice(id, choice, FinishReason::Stop)?;
        let request = self.requests.entry(id).or_default();
        request.progress.remove(&choice);
        let story = request.story;
        if last {
            self.requests.remove(&id);
        }
        Some(Output { last, ..Output::ended(id, choice, FinishReason::Stop, story) })
    }

    /// Forgets what the prefix cache holds and gives the number of blocks whose content could have been found.
    pub fn reset_prefix_cache(&mut self) -> usize {
        self.scheduler.reset_prefix_cache()
    }

    /// The state of every KV block, group by group.
    pub fn block_map(&self) -> Vec<Vec<BlockState>> {
        self.scheduler.block_map()
    }

    /// Plans a step, runs it, and gives each of its sequences what it gained.
    ///
    /// # Errors
    /// A failed backend. The engine must not be stepped again.
    pub fn step(&mut self) -> Result<Vec<Output>, EngineError> {
        let started = self.now();
        let late = self.scheduler.expired(started);
        let mut outputs: Vec<Output> = late.into_iter().flat_map(|id| self.end(id, FinishReason::Deadline)).collect();
        let plan = self.scheduler.schedule(started);
        if plan.spans.is_empty() {
            self.check_progress()?;
            return Ok(outputs);
        }
        self.note(&plan, started);
        let lowered = lower(&self.scheduler, &plan, self.num_groups, &mut self.requests, &self.masks);
        let result = self.backend.run(&mut self.plan, &lowered.inputs)?;
        // Before the commit, which might end them for a better reason.
        for id in self.gather(&lowered, &result) {
            outputs.extend(self.end(id, FinishReason::Error));
        }
        let committed = self.scheduler.commit(&plan, &accept(&self.scheduler, &plan, &result.sampled));
        let ended = self.now();
        self.count(ended - started, &committed, &lowered);
        outputs.extend(self.report(committed, &plan, result, ended));
        Ok(outputs)
    }

    /// Whether a step would do anything.
    pub fn has_work(&self) -> bool {
        self.scheduler.has_work()
    }

    /// Microseconds since the engine was loaded.
    pub fn now(&self) -> Micros {
        self.clock.elapsed().as_micros() as Micros
    }

    /// Counts so far.
    pub fn stats(&self) -> Stats {
        Stats { scheduler: self.scheduler.stats(), ..self.stats }
    }

    pub(crate) fn clock(&self) -> Instant {
        self.clock
    }

    pub(crate) fn limits(&self) -> AdmissionLimits {
        self.scheduler.limits().clone()
    }

    pub(crate) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// A step may be empty only if there is nothing to do.
    fn check_progress(&self) -> Result<(), EngineError> {
        let SchedulerStats { running, waiting, .. } = self.scheduler.stats();
        if running + waiting == 0 { Ok(()) } else { Err(EngineError::Stalled { running, waiting }) }
    }

    /// Keeps what the step says of prompts; gives the requests whose prompts it says nothing sensible of.
    fn gather(&mut self, lowered: &Lowered, result: &StepResult) -> Vec<RequestId> {
        for (&id, score) in lowered.scored.iter().zip(&result.scores) {
            self.requests.entry(id).or_default().prompt.add_score(score.clone());
        }
        for (&id, hidden) in lowered.pooled.iter().zip(result.hidden.chunks_exact(self.hidden_size)) {
            self.requests.entry(id).or_default().prompt.add_hidden(hidden);
        }
        let mut reported: Vec<RequestId> = lowered.scored.iter().chain(&lowered.pooled).copied().collect();
        reported.sort_unstable();
        reported.dedup();
        reported.retain(|id| self.requests.get(id).is_some_and(|request| request.prompt.has_failed()));
        reported
    }

    /// Writes into the stories what a plan means to its requests.
    fn note(&mut self, plan: &StepPlan, now: Micros) {
        for admitted in &plan.admitted {
            let story = &mut self.requests.entry(admitted.request).or_default().story;
            if story.scheduled.is_none() {
                story.scheduled = Some(now);
                (story.cached_tokens, story.first_difference) = (admitted.cached_tokens, admitted.first_difference);
            }
        }
        let request = |seq| self.scheduler.sequence(seq).map(Sequence::request);
        // The sequences of a request lose their blocks together.
        let mut preempted: Vec<_> = plan.preempted.iter().filter_map(|&seq| request(seq)).collect();
        preempted.dedup();
        for request in preempted {
            self.requests.entry(request).or_default().story.preemptions += 1;
        }
        for span in &plan.spans {
            let Some(sequence) = self.scheduler.sequence(span.seq) else { continue };
            if span.len > 1 + span.drafts || span.end() <= sequence.prompt_len() {
                self.requests.entry(sequence.request()).or_default().story.chunks += 1;
            }
        }
    }

    fn count(&mut self, duration: Micros, outputs: &[StepOutput], lowered: &Lowered) {
        let scheduler = self.scheduler.stats();
        let stats = &mut self.stats;
        stats.busy += duration;
        stats.masks += lowered.masks;
        stats.mask_nanos += lowered.mask_nanos;
        stats.generation_tokens += outputs.iter().map(|output| output.tokens.len() as u64).sum::<u64>();
        stats.most_blocks_used = stats.most_blocks_used.max(scheduler.blocks_total - scheduler.blocks_free);
        stats.slot_steps_allocated += scheduler.slots_allocated as u64;
        stats.slot_steps_used += scheduler.slots_used as u64;
        stats.slot_steps_reserved += scheduler.slots_reserved as u64;
        stats.slot_steps_internal += scheduler.slots_internal as u64;
        stats.slot_steps_external += scheduler.slots_external as u64;
    }

    /// Joins what the scheduler appended with the rows' log-probabilities and the requests' stories.
    fn report(&mut self, outputs: Vec<StepOutput>, plan: &StepPlan, result: StepResult, now: Micros) -> Vec<Output> {
        let choices = |span: &SeqSpan| {
            let seq = span.seq;
            (seq.choice..).take(span.samples).map(move |choice| SeqId { choice, ..seq })
        };
        let sampled = plan.spans.iter().flat_map(choices).zip(result.sampled);
        let mut logprobs: HashMap<SeqId, TokenLogprobs> =
            sampled.filter_map(|(seq, row)| Some((seq, row.ok()?.logprobs?))).collect();
        let mut report = |output: StepOutput| {
            let StepOutput { request, seq, tokens, finish, stop_token, last, hypothesis } = output;
            let live = self.requests.entry(request).or_default();
            if !tokens.is_empty() {
                live.story.first_token.get_or_insert(now);
                live.story.last_token = Some(now);
            }
            let (prompt_logprobs, pooled) = (live.prompt.take_scores(), live.prompt.take_pooled());
            let story = live.story;
            let finish = finish.map(|reason| Finish { reason, stop_token });
            if finish.is_some() {
                live.progress.remove(&seq.choice);
            }
            if last {
                self.requests.remove(&request);
            }
            let cumulative_logprob = hypothesis.as_ref().map(|found| found.cumulative_logprob);
            let logprobs = match hypothesis {
                Some(found) => accept::logprobs(&found),
                None => logprobs.remove(&seq).into_iter().collect(),
            };
            Output {
                request,
                choice: seq.choice,
                tokens,
                logprobs,
                cumulative_logprob,
                prompt_logprobs,
                pooled,
                finish,
                last,
                story,
            }
        };
        outputs.into_iter().map(&mut report).collect()
    }
}
