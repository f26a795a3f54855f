//! Calls into the tokenizers crate, which panics on some damaged files and on texts that meet them.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::TokenizerError;

/// What the library answers; a panic in it is an error like any other.
pub(super) fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, TokenizerError> {
    unpanicked(call)?.map_err(TokenizerError::library)
}

/// What the library answers, its errors included; only a panic is an error here.
pub(super) fn unpanicked<T>(call: impl FnOnce() -> T) -> Result<T, TokenizerError> {
    // The library changes nothing but its caches, which it does not use once they are poisoned.
    catch_unwind(AssertUnwindSafe(call))
        .map_err(|panic| TokenizerError::Rules(format!("the library failed: {}", message(&*panic))))
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it gives no reason")
}
