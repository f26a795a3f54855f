//! The engine's thread: drains commands, steps while work remains, sleeps when there is none.

use std::collections::{BTreeMap, HashMap};
use std::sync::{
    Arc, OnceLock,
    mpsc::{Receiver, Sender},
};

use octavo_backend::Backend;
use octavo_sched::{BlockState, FinishReason, Request, RequestId};

use crate::{
    Engine, EngineError, Event, Extras, Output, Stats,
    inbox::{Address, AddressId},
};

/// What a handle asks of the thread.
pub(crate) enum Command {
    Add(Vec<(Request, Extras)>, Address),
    Abort(Vec<RequestId>),
    Stop(RequestId, u32),
    Stats(Sender<Stats>),
    BlockMap(Sender<Vec<Vec<BlockState>>>),
    ResetPrefixCache(Sender<usize>),
    Panic(String),
    Shutdown,
}

/// Why the thread has ended, once it has.
pub(crate) type Obituary = Arc<OnceLock<String>>;

/// Runs `engine` until it is shut down, its handles are gone, or it fails; then tells every inbox.
pub(crate) fn run<B: Backend>(engine: Engine<B>, commands: Receiver<Command>, obituary: &Obituary) {
    let mut worker = Worker { engine, addresses: HashMap::new(), gone: BTreeMap::new() };
    // A panic in a kernel must reach the callers as an error; the engine is not used afterwards.
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| worker.serve(&commands)));
    let reason = match ended {
        Ok(Ok(())) => "it was closed".to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => format!("a panic: {}", panic_message(panic.as_ref())),
    };
    let reason = obituary.get_or_init(|| reason).clone();
    let mut addresses: BTreeMap<AddressId, Address> =
        worker.addresses.into_values().map(|address| (address.id(), address)).collect();
    // Whoever submits after this loop sees the obituary, which was written before it.
    for command in commands.try_iter() {
        if let Command::Add(_, address) = command {
            addresses.insert(address.id(), address);
        }
    }
    for address in addresses.into_values() {
        // A caller that has gone needs no answer.
        let _ = address.send(Event::Died(reason.clone()));
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

fn answer<T>(reply: &Sender<T>, answer: T) {
    // The asker may have given up.
    let _ = reply.send(answer);
}

struct Worker<B: Backend> {
    engine: Engine<B>,
    addresses: HashMap<RequestId, Address>,
    /// Inboxes that are gone. The address is kept so that no new inbox has its id.
    gone: BTreeMap<AddressId, Address>,
}

impl<B: Backend> Worker<B> {
    fn serve(&mut self, commands: &Receiver<Command>) -> Result<(), EngineError> {
        loop {
            if !self.engine.has_work() {
                let Ok(command) = commands.recv() else { return Ok(()) };
                if self.obey(command).is_break() {
                    return Ok(());
                }
            }
            while let Ok(command) = commands.try_recv() {
                if self.obey(command).is_break() {
                    return Ok(());
                }
            }
            self.abort_orphans();
            if self.engine.has_work() {
                let outputs = self.engine.step()?;
                self.deliver(outputs);
            }
        }
    }

    fn obey(&mut self, command: Command) -> std::ops::ControlFlow<()> {
        match command {
            Command::Add(requests, address) => {
                requests.into_iter().for_each(|(request, extras)| self.add(request, extras, &address))
            }
            Command::Abort(ids) => self.abort(&ids),
            Command::Stop(id, choice) => {
                let output = self.engine.stop(id, choice);
                self.deliver(output.into_iter().collect());
            }
            Command::Stats(reply) => answer(&reply, self.engine.stats()),
            Command::BlockMap(reply) => answer(&reply, self.engine.block_map()),
            Command::ResetPrefixCache(reply) => answer(&reply, self.engine.reset_prefix_cache()),
            // A panic but for what it prints, which takes a second where a backtrace is asked for.
            Command::Panic(message) => std::panic::resume_unwind(Box::new(message)),
            Command::Shutdown => return std::ops::ControlFlow::Break(()),
        }
        std::ops::ControlFlow::Continue(())
    }

    fn add(&mut self, request: Request, extras: Extras, address: &Address) {
        let id = request.id;
        match self.engine.add_with(request, extras) {
            Ok(()) => {
                self.addresses.insert(id, address.clone());
            }
            // The handle has checked everything that the scheduler checks, with the scheduler's own function.
            Err(reason) => panic!("request {} passed the door and was refused inside: {reason}", id.0),
        }
    }

    fn abort(&mut self, ids: &[RequestId]) {
        let outputs = ids.iter().flat_map(|&id| self.engine.end(id, FinishReason::Abort)).collect();
        self.deliver(outputs);
    }

    /// Sends each inbox its outputs, once, and notes those that are gone.
    fn deliver(&mut self, outputs: Vec<Output>) {
        let mut mail: BTreeMap<AddressId, (Address, Vec<Output>)> = BTreeMap::new();
        for output in outputs {
            let address = if output.last {
                self.addresses.remove(&output.request)
            } else {
                self.addresses.get(&output.request).cloned()
            };
            if let Some(address) = address {
                mail.entry(address.id()).or_insert_with(|| (address, Vec::new())).1.push(output);
            }
        }
        for (id, (address, outputs)) in mail {
            if !address.send(Event::Outputs(outputs)) {
                self.gone.insert(id, address);
            }
        }
    }

    /// Ends the requests whose inbox is gone. Whatever was asked before that has been done by now, so that a continuation
    /// which was to stop has stopped.
    fn abort_orphans(&mut self) {
        if self.gone.is_empty() {
            return;
        }
        let gone = std::mem::take(&mut self.gone);
        let orphans = self.addresses.iter().filter(|(_, address)| gone.contains_key(&address.id()));
        for orphan in orphans.map(|(&id, _)| id).collect::<Vec<_>>() {
            self.engine.end(orphan, FinishReason::Abort);
            self.addresses.remove(&orphan);
        }
    }
}
