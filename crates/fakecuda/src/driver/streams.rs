//! Streams, events, and what is captured from a stream.
//!
//! SAFETY of the whole module: as for the one above it.

use std::ffi::{c_int, c_uint};

use super::{Handle, code, exported, give, with_context};
use crate::{
    codes::{self, Code},
    state::{Event, Operation, State},
};

exported! {
    /// A stream; all are alike.
    fn cuStreamCreate(stream: *mut Handle, _flags: c_uint) -> Code {
        // SAFETY: see the module.
        with_context(|state| unsafe { give(stream, state.create_stream() as Handle) })
    }

    /// A stream; priorities mean nothing.
    fn cuStreamCreateWithPriority(stream: *mut Handle, _flags: c_uint, _priority: c_int) -> Code {
        // SAFETY: see the module.
        with_context(|state| unsafe { give(stream, state.create_stream() as Handle) })
    }

    /// Ends a stream once all in it is done.
    fn cuStreamDestroy_v2(stream: Handle) -> Code {
        with_context(|state| state.destroy_stream(stream as usize))
    }

    /// Runs all that is queued in a stream.
    fn cuStreamSynchronize(stream: Handle) -> Code {
        with_context(|state| state.drain(stream as usize))
    }

    /// Nothing more of a stream before an event.
    fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) -> Code {
        with_context(|state| match event_of(state, event)?.recorded {
            Some((other, upto)) if other != stream as usize => {
                state.enqueue(stream as usize, Operation::Wait { stream: other, upto })
            }
            _ => Ok(()),
        })
    }

    /// Keeps what is queued from now on for a graph.
    fn cuStreamBeginCapture_v2(stream: Handle, _mode: c_int) -> Code {
        with_context(|state| state.begin_capture(stream as usize))
    }

    /// The graph of what was kept.
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) -> Code {
        // SAFETY: see the module.
        with_context(|state| unsafe { give(graph, state.end_capture(stream as usize)? as Handle) })
    }

    /// Whether a stream is captured.
    fn cuStreamIsCapturing(stream: Handle, status: *mut c_int) -> Code {
        // SAFETY: see the module.
        with_context(|state| unsafe { give(status, c_int::from(state.is_capturing(stream as usize)?)) })
    }

    /// An event.
    fn cuEventCreate(event: *mut Handle, _flags: c_uint) -> Code {
        with_context(|state| {
            let handle = state.handle();
            state.events.insert(handle, Event::default());
            // SAFETY: see the module.
            unsafe { give(event, handle as Handle) }
        })
    }

    /// Ends an event.
    fn cuEventDestroy_v2(event: Handle) -> Code {
        with_context(|state| state.events.remove(&(event as usize)).map(|_| ()).ok_or(codes::INVALID_HANDLE))
    }

    /// Marks where a stream's queue ends now.
    fn cuEventRecord(event: Handle, stream: Handle) -> Code {
        with_context(|state| {
            event_of(state, event)?;
            let upto = state.end_of(stream as usize)?;
            state.events.insert(event as usize, Event { recorded: Some((stream as usize, upto)) });
            Ok(())
        })
    }

    /// Runs a stream up to the mark.
    fn cuEventSynchronize(event: Handle) -> Code {
        with_context(|state| match event_of(state, event)?.recorded {
            Some((stream, upto)) => state.drain_to(stream, upto),
            None => Ok(()),
        })
    }

    /// Whether the mark is passed.
    fn cuEventQuery(event: Handle) -> Code {
        with_context(|state| match event_of(state, event)?.recorded {
            Some((stream, upto)) if !state.has_reached(stream, upto) => Err(codes::NOT_READY),
            _ => Ok(()),
        })
    }

    /// There is no time here.
    fn cuEventElapsedTime(milliseconds: *mut f32, _start: Handle, _end: Handle) -> Code {
        // SAFETY: see the module.
        code(unsafe { give(milliseconds, 0.0) })
    }
}

fn event_of(state: &State, event: Handle) -> Result<Event, Code> {
    state.events.get(&(event as usize)).copied().ok_or(codes::INVALID_HANDLE)
}
