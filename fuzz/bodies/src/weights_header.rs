//! Headers of safetensors files: bytes of anybody.

use kvhoist_files::internals::header_of;
use safetensors::SafeTensors;

use crate::memory::bounded;

/// Reads `data` as a file: refused, or with what the format's library finds in it.
pub fn run(data: &[u8]) {
    // A tensor's name is read from a byte or more, and kept a few times.
    let found = bounded(512 * data.len() + (64 << 10), || header_of(data));
    match (found, SafeTensors::deserialize(data)) {
        (Ok(found), Ok(wanted)) => {
            assert_eq!(found.tensors.len(), wanted.len());
            let mut end = found.data_offset;
            for tensor in &found.tensors {
                let view = wanted.tensor(&tensor.name).expect("the library knows it");
                assert_eq!((tensor.dtype.clone(), &tensor.shape[..]), (view.dtype().to_string(), view.shape()));
                assert_eq!((tensor.offset, tensor.len), (end, view.data().len()), "one after the other");
                assert_eq!(&data[tensor.offset as usize..][..tensor.len], view.data());
                end += tensor.len as u64;
            }
            assert_eq!(end, data.len() as u64);
        }
        (Err(problem), Err(_)) => assert!(problem.starts_with("found "), "{problem}"),
        (found, wanted) => panic!("{:?}, and the library: {:?}", found, wanted.err()),
    }
}
