//! What grammars allow next, asked between two steps on several threads.
//!
//! A question and its answer depend on one output alone, so it does not matter which thread has it.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, channel},
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
    desk: Arc<Desk>,
    answers: Receiver<Answered>,
    threads: Vec<JoinHandle<()>>,
}

/// Where questions lie until somebody takes them. One that wakes late finds less to do, and nobody waits for it.
#[derive(Default)]
struct Desk {
    lying: Mutex<Lying>,
    news: Condvar,
}

#[derive(Default)]
struct Lying {
    questions: VecDeque<Question>,
    is_closed: bool,
}

impl MaskThreads {
    /// So many threads, the engine's own included; fewer if the operating system gives no more. They are made where no
    /// thread is bound to a processor yet, since they would be bound to the same.
    pub(crate) fn new(count: usize) -> MaskThreads {
        let (sender, answers) = channel();
        let desk = Arc::new(Desk::default());
        let spawn = |_| {
            let (desk, sender) = (Arc::clone(&desk), sender.clone());
            std::thread::Builder::new().name("octavo-masks".into()).spawn(move || {
                while let Some(question) = desk.wait() {
                    if sender.send(answer(question)).is_err() {
                        return;
                    }
                }
            })
        };
        let threads = (1..count).map_while(|index| spawn(index).ok()).collect();
        MaskThreads { desk, answers, threads }
    }

    /// Answers all questions, in any order.
    pub(crate) fn ask(&self, questions: Vec<Question>) -> Vec<Answered> {
        let count = questions.len();
        self.desk.lying().questions.extend(questions);
        // One question alone wakes nobody.
        if count > 1 {
            self.desk.news.notify_all();
        }
        let mut answered = Vec::with_capacity(count);
        while let Some(question) = self.desk.take() {
            answered.push(answer(question));
        }
        // The rest has been taken by others.
        answered.extend(self.answers.iter().take(count - answered.len()));
        answered
    }
}

impl Desk {
    fn lying(&self) -> MutexGuard<'_, Lying> {
        self.lying.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Option<Question> {
        self.lying().questions.pop_front()
    }

    /// The next question, however long that takes; `None` when there will be no more.
    fn wait(&self) -> Option<Question> {
        let mut lying = self.lying();
        loop {
            if let Some(question) = lying.questions.pop_back() {
                return Some(question);
            }
            if lying.is_closed {
                return None;
            }
            lying = self.news.wait(lying).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        self.desk.lying().is_closed = true;
        self.desk.news.notify_all();
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
