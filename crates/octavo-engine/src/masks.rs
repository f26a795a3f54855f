//! What grammars allow next, asked between two steps on several threads.
//!
//! A question and its answer depend on one output alone, so it does not matter which thread has it.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
};

use octavo_backend::TokenMask;
use octavo_sched::{SeqId, TokenId};

use crate::{Grammar, GrammarError, GrammarState};

/// An output and the grammar that it follows.
pub(crate) struct Question {
    pub seq: SeqId,
    pub grammar: Arc<dyn Grammar>,
    /// `None` before the first token.
    pub state: Option<Box<dyn GrammarState>>,
    /// What the state has not read yet.
    pub tokens: Vec<TokenId>,
    pub vocab_size: usize,
}

/// What may come next in an output.
pub(crate) struct Answer {
    pub state: Box<dyn GrammarState>,
    pub mask: TokenMask,
    pub may_end: bool,
}

type Answered = (SeqId, Result<Answer, GrammarError>);

/// Threads that answer beside the engine's own. They sleep while nobody asks, and end with this.
pub(crate) struct MaskThreads {
    questions: Vec<Sender<Question>>,
    answers: Receiver<Answered>,
    threads: Vec<JoinHandle<()>>,
}

impl MaskThreads {
    /// So many threads, the engine's own included; fewer if the operating system gives no more. They are made where no
    /// thread is bound to a processor yet, since they would be bound to the same.
    pub(crate) fn new(count: usize) -> MaskThreads {
        let (sender, answers) = channel();
        let (mut questions, mut threads) = (Vec::new(), Vec::new());
        for _ in 1..count {
            let (asker, asked) = channel::<Question>();
            let sender = sender.clone();
            let work = move || {
                for question in asked {
                    if sender.send(answer(question)).is_err() {
                        return;
                    }
                }
            };
            let thread = std::thread::Builder::new().name("octavo-masks".into()).spawn(work);
            if let Ok(thread) = thread {
                questions.push(asker);
                threads.push(thread);
            }
        }
        MaskThreads { questions, answers, threads }
    }

    /// Answers all questions, in any order.
    pub(crate) fn ask(&self, questions: Vec<Question>) -> Vec<Answered> {
        let (mut own, mut num_sent) = (Vec::new(), 0);
        // The engine's thread has the first turn: one question alone wakes nobody.
        let mut turns = std::iter::once(None).chain(self.questions.iter().map(Some)).cycle();
        for question in questions {
            match turns.next().flatten() {
                None => own.push(question),
                Some(thread) => match thread.send(question) {
                    Ok(()) => num_sent += 1,
                    Err(returned) => own.push(returned.0),
                },
            }
        }
        let mut answered: Vec<Answered> = own.into_iter().map(answer).collect();
        answered.extend(self.answers.iter().take(num_sent));
        answered
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        // Without anybody who asks they end.
        self.questions.clear();
        for thread in self.threads.drain(..) {
            // A thread catches its own panics.
            let _ = thread.join();
        }
    }
}

/// A panic in a grammar is an error of its output alone.
fn answer(question: Question) -> Answered {
    let seq = question.seq;
    let answered = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| try_answer(question)));
    (seq, answered.unwrap_or_else(|_| Err(GrammarError("it panicked".into()))))
}

fn try_answer(question: Question) -> Result<Answer, GrammarError> {
    let mut state = question.state.unwrap_or_else(|| question.grammar.start());
    for token in question.tokens {
        state.advance(token)?;
    }
    let mut mask = TokenMask::none(question.vocab_size);
    state.allowed(&mut mask)?;
    let may_end = state.may_end()?;
    Ok(Answer { state, mask, may_end })
}
