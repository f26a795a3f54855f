//! From the scheduler's plan to the backend's flat arrays.

use std::collections::HashMap;

use octavo_backend::{BlockCopy, GroupInputs, LogitRules, SampleRow, ScoreRow, SpanInput, StepInputs, TokenMask};
use octavo_sched::{RequestId, Scheduler, SeqId, SeqSpan, Sequence, StepPlan};

use crate::{
    GrammarError,
    live::LiveRequest,
    masks::{Answer, MaskThreads},
};

/// What the grammars of a step's draws answered.
type Answers = HashMap<SeqId, Result<Answer, GrammarError>>;

/// A step as the backend takes it.
#[derive(Default)]
pub(crate) struct Lowered {
    pub inputs: StepInputs,
    /// The request of each of [`StepInputs::scores`].
    pub scored: Vec<RequestId>,
    /// The request of each of [`StepInputs::hidden`].
    pub pooled: Vec<RequestId>,
    /// Draws before which a grammar was asked.
    pub masks: u64,
    /// How long that took, in nanoseconds, all of them together.
    pub mask_nanos: u64,
}

/// Writes out the tokens, block tables and wanted rows of `plan`.
///
/// Invariant: every span of the plan belongs to a sequence that the scheduler still holds; the plan was made by the
/// same scheduler and nothing was aborted since.
pub(crate) fn lower(
    scheduler: &Scheduler,
    plan: &StepPlan,
    num_groups: usize,
    requests: &mut HashMap<RequestId, LiveRequest>,
    threads: &MaskThreads,
) -> Lowered {
    let mut lowered = Lowered::default();
    let mut answers = lowered.ask_grammars(scheduler, plan, requests, threads);
    let empty = GroupInputs { table_starts: vec![0], ..GroupInputs::default() };
    lowered.inputs.groups = vec![empty; num_groups];
    for span in &plan.spans {
        let Some(sequence) = scheduler.sequence(span.seq) else { continue };
        let inputs = &mut lowered.inputs;
        let first_row = inputs.tokens.len();
        inputs.spans.push(SpanInput { first_row, len: span.len, start: span.start });
        inputs.tokens.extend(&sequence.tokens()[span.start..span.end()]);
        for (group, table) in inputs.groups.iter_mut().zip(sequence.tables()) {
            group.tables.extend(table.blocks());
            group.table_starts.push(group.tables.len());
        }
        let request = requests.entry(sequence.request()).or_default();
        lowered.report_prompt(span, sequence, request);
        lowered.sample(span, sequence, request, answers.remove(&span.seq));
    }
    for copy in &plan.copies {
        lowered.inputs.groups[copy.group].copies.push(BlockCopy { from: copy.from, to: copy.to });
    }
    lowered
}

impl Lowered {
    /// The rows of a prompt whose log-probabilities or hidden states are wanted.
    fn report_prompt(&mut self, span: &SeqSpan, sequence: &Sequence, request: &LiveRequest) {
        let first_row = self.inputs.tokens.len() - span.len;
        let report = &request.prompt;
        for position in span.start..span.end().min(sequence.prompt_len()) {
            let row = first_row + position - span.start;
            let next = position + 1;
            if let Some(top) = report.wants_score(next).filter(|_| next < sequence.prompt_len()) {
                self.inputs.scores.push(ScoreRow { row, token: sequence.tokens()[next], top });
                self.scored.push(sequence.request());
            }
            if report.wants_hidden(position, sequence.prompt_len()) {
                self.inputs.hidden.push(row);
                self.pooled.push(sequence.request());
            }
        }
    }

    /// Asks the grammars of all draws of the step at once.
    fn ask_grammars(
        &mut self,
        scheduler: &Scheduler,
        plan: &StepPlan,
        requests: &mut HashMap<RequestId, LiveRequest>,
        threads: &MaskThreads,
    ) -> Answers {
        let started = std::time::Instant::now();
        let mut questions = Vec::new();
        for span in plan.spans.iter().filter(|span| span.samples > 0) {
            let Some(sequence) = scheduler.sequence(span.seq) else { continue };
            let Some(LiveRequest { rules: Some(rules), progress, .. }) = requests.get_mut(&sequence.request()) else {
                continue;
            };
            if rules.has_grammar() {
                questions.extend(rules.question(sequence, progress.entry(span.seq.choice).or_default()));
            }
        }
        if questions.is_empty() {
            return Answers::new();
        }
        self.masks = questions.len() as u64;
        let answers = threads.ask(questions).into_iter().collect();
        self.mask_nanos = started.elapsed().as_nanos() as u64;
        answers
    }

    /// The draws that follow a span; those of several continuations are from the same row, by the same rules.
    fn sample(
        &mut self,
        span: &SeqSpan,
        sequence: &Sequence,
        request: &mut LiveRequest,
        answer: Option<Result<Answer, GrammarError>>,
    ) {
        if span.samples == 0 {
            return;
        }
        let first = sequence.id().choice;
        let rules = next_rules(sequence, request, answer).map(Box::new);
        let row = self.inputs.tokens.len() - 1;
        let choices = (first..).take(span.samples);
        let samples = choices.map(|choice| SampleRow { rules: rules.clone(), ..sample_row(sequence, row, choice) });
        self.inputs.samples.extend(samples);
    }
}

fn next_rules(
    sequence: &Sequence,
    request: &mut LiveRequest,
    answer: Option<Result<Answer, GrammarError>>,
) -> Option<LogitRules> {
    let rules = request.rules.as_ref()?;
    let progress = request.progress.entry(sequence.id().choice).or_default();
    Some(rules.next(sequence, progress, answer).unwrap_or_else(|error| {
        log::warn!("request {}: {error}", sequence.request().0);
        // The draw fails, and with it this continuation alone.
        LogitRules { allowed: Some(TokenMask::none(rules.vocab_size()).into()), ..LogitRules::default() }
    }))
}

/// The draw of the token after a sequence, for one choice, from the logits of `row`.
fn sample_row(sequence: &Sequence, row: usize, choice: u32) -> SampleRow {
    let params = sequence.params();
    let position = sequence.tokens().len() as u32;
    if let Some(beam) = params.beam {
        // The search takes its candidates from what is reported.
        let (seed, logprobs) = (params.seed, Some(beam.width.saturating_mul(2)));
        return SampleRow { choice, seed, logprobs, ..SampleRow::greedy(row, position) };
    }
    SampleRow {
        row,
        position,
        choice,
        seed: params.seed,
        temperature: params.temperature,
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        logprobs: params.logprobs,
        rules: None,
    }
}
