//! Log lines of this process, kept so that tests can look for notices.

use std::sync::{Mutex, Once};

use log::{LevelFilter, Log, Metadata, Record};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
static INSTALL: Once = Once::new();

struct Keeper;

impl Log for Keeper {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        LINES.lock().unwrap().push(record.args().to_string());
    }

    fn flush(&self) {}
}

/// Runs `action` and returns the lines logged so far that contain `part`; a temporary folder's name tells tests apart.
pub fn log_lines_with(part: &str, action: impl FnOnce()) -> Vec<String> {
    INSTALL.call_once(|| {
        log::set_logger(&Keeper).unwrap();
        log::set_max_level(LevelFilter::Debug);
    });
    action();
    LINES.lock().unwrap().iter().filter(|line| line.contains(part)).cloned().collect()
}
