//! Questions whose answers take as long as a service or a drive hangs.

use std::{sync::Arc, time::Duration};

use tokio::{sync::Mutex, task::spawn_blocking, time::timeout};

/// How long a request waits for an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Somebody who answers one question at a time, on a thread that may block.
pub(super) struct Asked<T> {
    /// In messages: "the service".
    who: &'static str,
    question: Arc<Mutex<Question<T>>>,
    patience: Duration,
}

type Question<T> = Arc<dyn Fn() -> T + Send + Sync>;

impl<T: Send + 'static> Asked<T> {
    pub(super) fn new(who: &'static str, question: impl Fn() -> T + Send + Sync + 'static) -> Self {
        Asked { who, question: Arc::new(Mutex::new(Arc::new(question))), patience: PATIENCE }
    }

    #[cfg(test)]
    pub(super) fn patience(self, patience: Duration) -> Self {
        Asked { patience, ..self }
    }

    /// The answer, or the text for the client if there is none in time. The thread that asks goes on until it is
    /// answered, and nobody asks in the meantime: one thread hangs, however many requests come.
    pub(super) async fn ask(&self) -> Result<T, String> {
        let asked = async {
            let question = Arc::clone(&self.question).lock_owned().await;
            // Held by the thread that asks: a connection may be closed before it has its answer.
            spawn_blocking(move || {
                let answer = question();
                drop(question);
                answer
            })
            .await
        };
        match timeout(self.patience, asked).await {
            Ok(answered) => answered.map_err(|error| format!("{error}\n")),
            Err(_) => Err(format!("{} has not answered for {} s\n", self.who, self.patience.as_secs_f64())),
        }
    }
}

impl<T> Clone for Asked<T> {
    fn clone(&self) -> Self {
        Asked { who: self.who, question: Arc::clone(&self.question), patience: self.patience }
    }
}
