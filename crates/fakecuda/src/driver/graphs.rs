//! Graphs of captured work.
//!
//! SAFETY of the whole module: as for the one above it.

use super::{Handle, exported, give, with_context};
use crate::codes::{self, Code};

exported! {
    /// A graph that can be launched.
    fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, _flags: u64) -> Code {
        with_context(|state| {
            let operations = state.graphs.get(&(graph as usize)).ok_or(codes::INVALID_HANDLE)?.clone();
            let handle = state.handle();
            state.graphs.insert(handle, operations);
            // SAFETY: see the module.
            unsafe { give(executable, handle as Handle) }
        })
    }

    /// Queues everything in a graph.
    fn cuGraphLaunch(executable: Handle, stream: Handle) -> Code {
        with_context(|state| {
            let operations = state.graphs.get(&(executable as usize)).ok_or(codes::INVALID_HANDLE)?.clone();
            operations.iter().try_for_each(|operation| state.enqueue(stream as usize, operation.clone()))
        })
    }

    /// Nothing to do.
    fn cuGraphUpload(_executable: Handle, _stream: Handle) -> Code {
        codes::SUCCESS
    }

    /// Forgets a graph.
    fn cuGraphDestroy(graph: Handle) -> Code {
        with_context(|state| state.graphs.remove(&(graph as usize)).map(|_| ()).ok_or(codes::INVALID_HANDLE))
    }

    /// Forgets what could be launched.
    fn cuGraphExecDestroy(executable: Handle) -> Code {
        with_context(|state| state.graphs.remove(&(executable as usize)).map(|_| ()).ok_or(codes::INVALID_HANDLE))
    }
}
