//! The library's warnings.

use std::{
    fmt::{Debug, Write},
    sync::{Arc, Mutex},
};

use tracing::{
    Event, Level,
    field::{Field, Visit},
};

#[path = "../../common/on_event.rs"]
mod on_event;

/// Keeps the text of warnings and errors of the whole process.
#[derive(Default)]
pub struct Warnings(Arc<Mutex<Vec<String>>>);

impl Warnings {
    /// Listens from now on; once in a process.
    pub fn listen() -> Self {
        let warnings = Warnings::default();
        let lines = Arc::clone(&warnings.0);
        let log = on_event::OnEvent(move |event: &Event<'_>| {
            let level = event.metadata().level();
            if *level <= Level::WARN {
                let mut line = Line(level.to_string());
                event.record(&mut line);
                lines.lock().expect("no writer panicked").push(line.0);
            }
        });
        tracing::subscriber::set_global_default(log).expect("no other subscriber");
        warnings
    }

    /// All of it, a line each.
    pub fn text(&self) -> String {
        self.0.lock().expect("no writer panicked").join("\n")
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {}={value:?}", field.name()).expect("a string takes all");
    }
}
