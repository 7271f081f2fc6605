/* No Python.h: the few functions of Python's stable C interface are looked up at run time, so that one binary serves
   every Python. In `python script.py` they are those of the running interpreter; in the program `lmp` libpython is
   loaded and started as the interpreter of the environment whose `lmp` it is (plugin.py names both). */
#include "python_start.h"

#include <csignal>
#include <cstdlib>
#include <dlfcn.h>

namespace {

nvdd::Callback connected = nullptr;    // set once a process, by bridge.py
bool started_here = false;             // in the program `lmp`

template <class F> bool find(F &function, void *library, const char *name)
{
  function = reinterpret_cast<F>(dlsym(library ? library : RTLD_DEFAULT, name));
  return function != nullptr;
}

std::string load_libpython(void *&library)
{
  const char *file = getenv("NVDD_LAMMPS_LIBPYTHON");
  if (!file || !*file)
    return "this program has no Python in it, and its Python has no shared library to load into it: run the deck "
           "with `python -m nvdd_lammps.lmp` in place of `lmp`";
  library = dlopen(file, RTLD_NOW | RTLD_GLOBAL);
  if (!library) return std::string("cannot load Python's library: ") + dlerror();
  return "";
}

std::string initialize(void *library)
{
  void (*set_program_name)(const wchar_t *);
  wchar_t *(*decode)(const char *, size_t *);
  void (*start)(int);
  // the name of the environment's python is how the interpreter finds the environment's packages
  const char *program = getenv("NVDD_LAMMPS_PYTHON");
  if (!program || !*program) return "NVDD_LAMMPS_PYTHON is not set: start LAMMPS by the environment's `lmp`";
  if (!find(set_program_name, library, "Py_SetProgramName") || !find(decode, library, "Py_DecodeLocale") ||
      !find(start, library, "Py_InitializeEx"))
    return std::string("cannot start ") + program + " inside `lmp`: run the deck with `python -m nvdd_lammps.lmp`";
  // a rank that takes all cores slows the others down; LAMMPS's own default is one thread as well
  setenv("OMP_NUM_THREADS", "1", 0);
  set_program_name(decode(program, nullptr));
  start(0);    // 0: no signal handlers, Ctrl-C ends LAMMPS as ever
  return "";
}

}    // namespace

nvdd::KeepInterrupt::KeepInterrupt() { sigaction(SIGINT, nullptr, &before); }

nvdd::KeepInterrupt::~KeepInterrupt()
{
  if (started_here) sigaction(SIGINT, &before, nullptr);
}

extern "C" void nvdd_connect(nvdd::Callback callback) { connected = callback; }

std::string nvdd::start_python(Callback &callback, bool finalized_by_lammps)
{
  callback = connected;
  if (callback) return "";
  void *library = nullptr;
  int (*is_initialized)();
  if (!find(is_initialized, nullptr, "Py_IsInitialized")) {
    std::string problem = load_libpython(library);
    if (!problem.empty()) return problem;
    if (!find(is_initialized, library, "Py_IsInitialized")) return "libpython has no Py_IsInitialized";
  }
  int (*ensure)();
  void (*release)(int);
  int (*run)(const char *);
  void *(*save_thread)();
  if (!find(ensure, library, "PyGILState_Ensure") || !find(release, library, "PyGILState_Release") ||
      !find(run, library, "PyRun_SimpleString") || !find(save_thread, library, "PyEval_SaveThread"))
    return "the Python in this process lacks functions of its C interface";
  if (!is_initialized()) {
    std::string problem = initialize(library);
    if (!problem.empty()) return problem;
    // Each later entry takes the lock itself (ctypes does). A LAMMPS that finalizes Python does so without the lock.
    if (!finalized_by_lammps) save_thread();
    started_here = true;
  }
  KeepInterrupt keep;
  int state = ensure();
  std::string code = "from nvdd_lammps import bridge\nbridge.connect(" +
      std::to_string(reinterpret_cast<unsigned long long>(&nvdd_connect)) + ", " + std::to_string(sizeof(Model)) +
      ", " + std::to_string(sizeof(Step)) + ")\n";
  int status = run(code.c_str());
  release(state);
  callback = connected;
  if (status || !callback) return "cannot import nvdd_lammps in this Python; its error is above. `nvdd doctor` tells more";
  return "";
}
