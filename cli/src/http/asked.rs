//! Questions whose answers take as long as a service or a drive hangs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{sync::Mutex, task::spawn_blocking, time::timeout};

/// How long a request waits for an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Somebody who answers one question at a time, on a thread that may block. All who wait meanwhile share the next
/// answer.
pub(super) struct Asked<T> {
    /// In messages: "the service".
    who: &'static str,
    answers: Arc<Mutex<Answers<T>>>,
    /// How often the question was asked.
    begun: Arc<AtomicU64>,
    patience: Duration,
}

struct Answers<T> {
    question: Box<dyn Fn() -> T + Send>,
    /// The last answer, with its number.
    last: Option<(u64, T)>,
}

impl<T: Clone + Send + 'static> Asked<T> {
    pub(super) fn new(who: &'static str, question: impl Fn() -> T + Send + 'static) -> Self {
        let answers = Answers { question: Box::new(question), last: None };
        Asked { who, answers: Arc::new(Mutex::new(answers)), begun: Arc::default(), patience: PATIENCE }
    }

    #[cfg(test)]
    pub(super) fn patience(self, patience: Duration) -> Self {
        Asked { patience, ..self }
    }

    /// An answer to a question that was asked after this call, or the text for the client if there is none in time. The
    /// thread that asks goes on until it is answered, and nobody asks in the meantime: one thread hangs, however many
    /// requests come.
    pub(super) async fn ask(&self) -> Result<T, String> {
        let seen = self.begun.load(Ordering::Acquire);
        let asked = async {
            let mut answers = Arc::clone(&self.answers).lock_owned().await;
            if let Some((number, answer)) = &answers.last
                && *number > seen
            {
                return Ok(answer.clone());
            }
            let begun = Arc::clone(&self.begun);
            // The lock is held by the thread that asks: a connection may be closed before it has its answer.
            let ask = move || {
                let number = begun.fetch_add(1, Ordering::AcqRel) + 1;
                let answer = (answers.question)();
                answers.last = Some((number, answer.clone()));
                answer
            };
            spawn_blocking(ask).await
        };
        match timeout(self.patience, asked).await {
            Ok(answered) => answered.map_err(|error| format!("{error}\n")),
            Err(_) => Err(format!("{} has not answered for {} s\n", self.who, self.patience.as_secs_f64())),
        }
    }
}

impl<T> Clone for Asked<T> {
    fn clone(&self) -> Self {
        let Asked { who, patience, .. } = *self;
        Asked { who, answers: Arc::clone(&self.answers), begun: Arc::clone(&self.begun), patience }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::task::JoinSet;

    use super::*;

    #[test]
    fn those_who_wait_share_an_answer_to_a_question_after_theirs() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let ((begun, begins), (answer, answers)) = (mpsc::channel(), mpsc::channel());
        let question = move || {
            begun.send(()).expect("the test waits");
            answers.recv().expect("the test answers")
        };
        let asked = Asked::new("a test", question);
        runtime.block_on(async {
            let ask = || {
                let asked = asked.clone();
                async move { asked.ask().await.expect("answered") }
            };
            let first = tokio::spawn(ask());
            while begins.try_recv().is_err() {
                tokio::task::yield_now().await;
            }
            let mut waiting: JoinSet<u32> = (0..10).map(|_| ask()).collect();
            // Each of them has its turn, and waits.
            tokio::task::yield_now().await;
            (0..2).for_each(|number| answer.send(number).expect("it is asked"));
            assert_eq!(first.await.expect("no panic"), 0);
            while let Some(shared) = waiting.join_next().await {
                assert_eq!(shared.expect("no panic"), 1, "the first was asked before");
            }
        });
    }
}
