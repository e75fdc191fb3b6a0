//! The node's service, with real processes: a service, and clients of it.

#[path = "../../../tests/common/apart.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod apart;
#[path = "../../../tests/common/mod.rs"]
mod common;

mod attach;
mod calls;
mod changed_memory;
mod child;
#[cfg(feature = "cuda")]
mod cuda;
mod deaths;
mod descriptors;
mod device_end;
mod drawn;
mod engines;
mod files;
mod frames;
mod hints;
mod hostile;
mod hostile_layers;
mod hung;
mod killed;
mod kills;
mod late;
mod layers;
mod limits;
mod little_memory;
mod neighbor;
mod node;
mod pool;
mod pool_client;
mod raw;
mod refused_memory;
mod shared_node;
mod shares;
mod taken_away;
mod twins;
mod users;
